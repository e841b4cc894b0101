"""`launch_server --use-ray`: the router in this process, and workers on the nodes of a Ray cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import sys
from functools import partial

from mla_router import Router, RouterConfig
from mla_router.launch.banner import ready_text
from mla_router.launch.options import Options
from mla_router.launch.output import Output
from mla_router.launch.ray.cluster import RayCluster
from mla_router.launch.ray.worker import RayWorker
from mla_router.launch.router_config import router_config, with_worker_key
from mla_router.launch.serving import ROTATION_POLL_S, serve
from mla_router.launch.supervisor import RestartPolicy, Supervisor
from mla_router.worker.config import WorkerConfig


def serve_on_ray(options: Options, policy: RestartPolicy) -> int:
    """Runs until a signal. Returns the exit status. Raises ClusterError, BadRouterFlagError, RouterError, GaveUpError."""
    config = router_config(options, [])
    config = with_worker_key(config, config.to_dict()["worker_api_key"] or secrets.token_hex(32))
    cluster = RayCluster(options.ray_address)
    try:
        with Output(sys.stdout) as output:
            return asyncio.run(_serve(options, config, cluster, policy, output))
    finally:
        cluster.close()


async def _serve(
    options: Options,
    config: RouterConfig,
    cluster: RayCluster,
    policy: RestartPolicy,
    output: Output,
) -> int:
    if options.without_effect:
        output.launch("without effect here: " + ", ".join(options.without_effect))
    settings = config.to_dict()
    key = str(settings["worker_api_key"])
    router = Router(config)
    router.start()
    device = options.every_worker.device
    if device == "auto":
        device = "cuda" if cluster.has_gpus() else "cpu"

    def worker(index: int) -> RayWorker:
        own = dataclasses.replace(options.ray_worker(index, device), api_key=key, admin_api_key=key)
        needs = resources(own)
        return RayWorker(
            own,
            place=partial(cluster.place, needs, own.nnodes),
            router=router,
            show=partial(output.worker, index),
            on_pending=lambda: output.launch(
                f"worker {index} waits for {_nodes(own.nnodes)} with {_text(needs)}"
            ),
        )

    workers = [worker(index) for index in range(options.dp_size)]
    supervisor = Supervisor(workers, output, policy)

    async def announce() -> None:
        while not (ready := [entry for entry in router.workers() if entry["healthy"]]):
            await asyncio.sleep(ROTATION_POLL_S)
        urls = [entry["url"] for entry in ready]
        model = next(iter(ready[0]["models"]), "")
        common = options.every_worker
        output.plain(ready_text(router.url, settings["policy"], common, urls, model))

    drain_s = settings["shutdown_grace_period_secs"]
    return await serve(router, supervisor, drain_s, output, announce())


def resources(worker: WorkerConfig) -> dict[str, float]:
    """Returns Ray's resources of a worker on each of its nodes: a GPU for each rank, or on CPUs a core for each thread."""
    ranks = len(worker.ranks_here)
    return {"CPU": ranks * worker.cpu_threads} if worker.device == "cpu" else {"GPU": ranks}


def _nodes(count: int) -> str:
    return "a node" if count == 1 else f"{count} nodes"


def _text(needs: dict[str, float]) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in needs.items())
