"""`python -m mla_router.launch_server`: the router in this process, and workers as child processes. On a node other than 0
it starts ranks alone (`node.py`).

The router starts first, so that a wrong port fails before a model is loaded. It has the addresses of all workers, and
its health checks bring them into rotation after a start or a restart. The supervisor only restarts processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mla_router.launch.arguments import parse, with_launcher_flags
from mla_router.launch.banner import ready_text
from mla_router.launch.installed import require_ray, require_router, require_worker
from mla_router.launch.local_group import LocalGroup
from mla_router.launch.local_worker import LocalWorker, WorkerCommand, worker_command
from mla_router.launch.options import WORKER_HOST, Options
from mla_router.launch.output import Output
from mla_router.launch.ports import ClaimedPorts, NoPortError
from mla_router.launch.remote_workers import RemoteWorkers
from mla_router.launch.router_config import (
    BadRouterFlagError,
    router_config,
    with_router_keys,
    with_worker_key,
)
from mla_router.launch.secrets import hide_keys, warn_of_misspelt_keys
from mla_router.launch.serving import ROTATION_POLL_S, serve
from mla_router.launch.signals import KILLED_BY_CTRL_C
from mla_router.launch.standard_files import open_standard_files
from mla_router.launch.supervisor import GaveUpError, RestartPolicy, Supervisor
from mla_router.worker import preflight
from mla_router.worker.config import EXIT_BAD_SETTINGS, ConfigError, WorkerConfig
from mla_router.worker.model_folder import locate

if TYPE_CHECKING:
    from mla_router import Router
    from mla_router.launch.node_processes import RankCommand

# Purpose of the key that the router sends to workers on several nodes
WORKERS = "requests to workers"


def main() -> int:
    open_standard_files()
    hide_keys()
    warn_of_misspelt_keys()
    require_worker()
    return run(sys.argv[1:])


def run(
    argv: Sequence[str],
    command: WorkerCommand = worker_command,
    policy: RestartPolicy = RestartPolicy(),  # noqa: B008 (frozen)
    rank: RankCommand | None = None,
) -> int:
    """Runs the command. Returns the exit status. Tests pass workers of their own as `command`, and ranks as `rank`."""
    require_router()
    from mla_router._router import RouterError, ignored_router_flags, router_flags

    options = parse(argv, router_flags(), ignored_router_flags())
    try:
        if options.ray_address:  # each node has its own models and GPUs
            require_ray()
            from mla_router.launch.ray.server import serve_on_ray

            return serve_on_ray(options, policy)
        options = dataclasses.replace(options, every_worker=locate(options.every_worker))
        last = options.workers_here[-1]  # the worker with the last GPU
        preflight.check(options.worker(last, 0))
        if options.every_worker.node_rank:
            with Output(sys.stdout) as output:
                return _serve_node(options, command, policy, rank, output)
        with _ports(options, WORKER_HOST) as ports, Output(sys.stdout) as output:
            return asyncio.run(_serve(options, ports, command, policy, output))
    except KeyboardInterrupt:  # outside the time of `StopSignals`, as during a download
        return KILLED_BY_CTRL_C
    except (BadRouterFlagError, ConfigError, RouterError, NoPortError, GaveUpError) as error:
        message = with_launcher_flags(str(error)) if isinstance(error, RouterError) else str(error)
        print(f"error: {message}", file=sys.stderr)
        return EXIT_BAD_SETTINGS if isinstance(error, BadRouterFlagError | ConfigError) else 1


def _ports(options: Options, host: str) -> ClaimedPorts:
    count, keep_off = len(options.workers_here), frozenset({options.port})
    return ClaimedPorts(host, options.worker_base_port, count, keep_off)


def _serve_node(
    options: Options,
    command: WorkerCommand,
    policy: RestartPolicy,
    rank: RankCommand | None,
    output: Output,
) -> int:
    """Runs a node other than 0. Returns the exit status. Raises NoPortError, GaveUpError."""
    # They import packages of a worker, which `main` checks first.
    from mla_router.launch.node import serve_node
    from mla_router.launch.node_processes import DpRanks, Ranks, rank_command
    from mla_router.worker.nodes.address import host_port, own_address, resolve_in_time

    if not options.spans_nodes:
        node = options.worker(0, 0)
        ranks = Ranks(node, rank or rank_command, output)
        return asyncio.run(serve_node(node, ranks, output, policy))
    try:
        host, port = host_port(options.every_worker.dist_init_addr)
        timeout_s = options.every_worker.dist_timeout
        _, node_0 = asyncio.run(resolve_in_time(host, port, timeout_s, output.launch))
        address = own_address(node_0, port)
    except OSError as error:
        raise GaveUpError(
            f"--dist-init-addr {options.every_worker.dist_init_addr}: {error.strerror or error}"
        ) from error
    key = options.shared_key(WORKERS)
    with _ports(options, address) as ports:
        workers = [
            with_router_keys(options.worker(index, port, address), key, key)
            for index, port in zip(options.workers_here, ports, strict=True)
        ]
        dp_ranks = DpRanks(workers, command, output)
        return asyncio.run(serve_node(options.every_worker, dp_ranks, output, policy))


async def _serve(
    options: Options,
    ports: Sequence[int],
    command: WorkerCommand,
    policy: RestartPolicy,
    output: Output,
) -> int:
    from mla_router import Router

    if options.without_effect:
        output.launch("without effect here: " + ", ".join(options.without_effect))
    urls = [f"http://{WORKER_HOST}:{port}" for port in ports]
    config = router_config(options, urls)
    if options.spans_nodes:
        config = with_worker_key(config, options.shared_key(WORKERS))
        logging.getLogger("mla_router").addHandler(output.log())  # of the links to the nodes
    settings = config.to_dict()
    workers = [
        with_router_keys(
            options.worker(index, port),
            settings["worker_api_key"],
            settings["worker_admin_api_key"],
        )
        for index, port in enumerate(ports)
    ]
    router = Router(config)
    router.start()
    _report_moved_ports(options, workers, output)
    members = [
        (worker, command(worker), partial(output.worker, index))
        for index, worker in enumerate(workers)
    ]
    others = RemoteWorkers(router)
    supervisor = Supervisor(
        [LocalGroup(members, others.come)]
        if options.every_worker.attn_dp_size > 1
        else [LocalWorker(*one) for one in members],
        output,
        policy,
    )

    async def announce() -> None:
        await supervisor.all_ready()
        everywhere = [*urls, *others.urls]
        await _in_rotation(router, everywhere)
        common = options.every_worker
        output.plain(ready_text(router.url, settings["policy"], common, everywhere))

    drain_s = settings["shutdown_grace_period_secs"]
    return await serve(router, supervisor, drain_s, output, announce())


def _report_moved_ports(options: Options, workers: Sequence[WorkerConfig], output: Output) -> None:
    for index, worker in enumerate(workers):
        wanted = options.worker_base_port + index
        if worker.port != wanted:
            output.launch(f"worker {index} gets port {worker.port}, not {wanted}: ports are taken")


async def _in_rotation(router: Router, urls: Sequence[str]) -> None:
    """Waits until all workers at `urls` are in rotation."""
    while not {w["url"] for w in router.workers() if w["healthy"]} >= set(urls):
        await asyncio.sleep(ROTATION_POLL_S)
