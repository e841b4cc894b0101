"""The command line of `launch_server`: the flags of the workers, the flags of the router, and the number of workers.

Nothing is defined twice. The workers' flags come from `worker.config`. The router's flags come from its own command
line, with the prefix `--router-` as in SGLang, except those for incoming connections. This module adds the launcher's
own flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mla_router import __version__
from mla_router.launch.options import WORKER_HOST, Options
from mla_router.worker import flags as worker_flags
from mla_router.worker.config import ConfigError, WorkerConfig

# The launcher sets these for each worker, so they are not flags.
PER_WORKER = frozenset({"host", "port", "worker_id", "attn_dp_size", "attn_dp_rank"})
# The launcher sets these for the router. The keys are flags of the workers: the router requires the same keys of its
# clients and forwards them.
LAUNCHERS = frozenset(
    {
        "host",
        "port",
        "worker-urls",
        "worker-api-key",
        "worker-admin-api-key",
        "api-key",
        "admin-api-key",
        "replay-key",
    }
)
# The nodes of a worker on a Ray cluster meet at the address of its node 0 there.
CHOSEN_BY_RAY = "0.0.0.0:1"
# SGLang's other names of a flag that is defined here.
DP_SIZE = ("--dp-size", "--data-parallel-size", "--dp")
DP_ATTENTION = "--enable-dp-attention"
# Flags of the router for incoming connections, without the prefix.
WITHOUT_PREFIX = frozenset({"insecure", "tls-cert-path", "tls-key-path"})


def launch_parser(
    router_flags: Sequence[Mapping[str, Any]], ignored: Iterable[str] = ()
) -> worker_flags.Parser:
    """Returns the parser of `launch_server`. `router_flags`, `ignored`: see `parse`."""
    parser = worker_flags.Parser(
        "python -m mla_router.launch_server",
        "[--model-path DIR_OR_NAME] [--dp-size N] [flag ...]",
        "Start data-parallel workers and the router in front of them. Flags have SGLang's names; flags of "
        "SGLang that are not listed here are accepted if they change no answer. Those of the router alone "
        "have the prefix --router-, except those for TLS and for a server without a key.",
        examples=(
            ("the small model that the package ships, on the CPU", "--dp-size 2"),
            (
                "a model of the Hugging Face Hub, one worker on each of 2 GPUs",
                "--model-path deepseek-ai/DeepSeek-V2-Lite --dp-size 2",
            ),
            (
                "for other machines, with keys, which no other user sees",
                "--host 0.0.0.0   # after: export MLA_ROUTER_API_KEY=... MLA_ROUTER_ADMIN_API_KEY=...",
            ),
        ),
    )
    parser.add_argument("--version", action="version", version=__version__)
    _add_launch_flags(parser.add_argument_group("launch (what is started, and where it listens)"))
    defined = PER_WORKER | {*DP_SIZE, DP_ATTENTION}
    worker_flags.add_flags(parser, leave_out=defined, prefix="every worker, ")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in _forwarded(router_flags):
        title = f"router, {flag['heading'].lower()}"
        group = groups.setdefault(title, parser.add_argument_group(title))
        _add_router_flag(group, flag)
    for name in ignored:
        parser.add_argument(_flag(name), dest=_dest(name), help=argparse.SUPPRESS)
    return parser


def _forwarded(router_flags: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the router's flags that are also flags of `launch_server`."""
    return [flag for flag in router_flags if flag["name"] not in LAUNCHERS]


def parse(
    argv: Sequence[str],
    router_flags: Sequence[Mapping[str, Any]],
    ignored: Mapping[str, str],
) -> Options:
    """Parses and checks. After an error it prints one line to stderr and exits with status 2.

    `router_flags` and `ignored` are the results of `mla_router._router.router_flags()` and
    `ignored_router_flags()`.
    """
    parser = launch_parser(router_flags, ignored)
    namespace = parser.parse_args(argv)
    fixed = {"host": WORKER_HOST, "port": namespace.router_dp_worker_base_port}
    if namespace.enable_dp_attention:
        fixed |= {"attn_dp_size": namespace.dp_size}
    if namespace.use_ray and namespace.nnodes > 1:
        fixed |= {"dist_init_addr": CHOSEN_BY_RAY, "dist_key": secrets.token_hex(32)}
    try:
        every_worker: WorkerConfig = worker_flags.from_namespace(namespace, **fixed)
    except ConfigError as error:
        parser.error(str(error))
    _check_launch(parser, namespace, every_worker)
    given = {
        flag["name"]: getattr(namespace, _dest(flag["name"])) for flag in _forwarded(router_flags)
    }
    options = Options(
        host=namespace.host,
        port=namespace.port,
        dp_size=namespace.dp_size,
        worker_base_port=namespace.router_dp_worker_base_port,
        router_flags={name: value for name, value in given.items() if value not in (None, False)},
        every_worker=every_worker,
        without_effect=_without_effect(namespace, every_worker, ignored),
        ray_address=(namespace.ray_address or "auto") if namespace.use_ray else "",
    )
    return options if every_worker.replay_key else _with_replay_key(options)


def _with_replay_key(options: Options) -> Options:
    """Returns `options` with a key by which workers recognize the continuations of the router, the same on all nodes."""
    key = options.shared_key("replay") if options.spans_nodes else secrets.token_hex(32)
    return dataclasses.replace(
        options, every_worker=dataclasses.replace(options.every_worker, replay_key=key)
    )


def _check_launch(
    parser: argparse.ArgumentParser, namespace: argparse.Namespace, every_worker: WorkerConfig
) -> None:
    """Exits with an error if flags of the launcher exclude each other or those of the workers."""
    if namespace.enable_dp_attention:
        _check_dp_attention(parser, every_worker, uses_ray=namespace.use_ray)
    elif every_worker.nnodes > 1 and namespace.dp_size > 1 and not namespace.use_ray:
        parser.error(
            f"--dp-size {namespace.dp_size}: with --nnodes {every_worker.nnodes} a launcher has one worker, or the DP ranks of "
            f"{DP_ATTENTION}; start launchers with other ports for the others, and mla_router.launch_router in front of all"
        )
    if namespace.use_ray:
        _check_ray(parser, namespace)
    elif namespace.ray_address:
        parser.error(f"--ray-address {namespace.ray_address}: give --use-ray as well")


def _without_effect(
    namespace: argparse.Namespace, every_worker: WorkerConfig, ignored: Mapping[str, str]
) -> list[str]:
    """Returns the given flags that have no effect, each with the reason."""
    others = [
        f"{_flag(name)} ({why})"
        for name, why in ignored.items()
        if getattr(namespace, _dest(name)) is not None
    ]
    if (
        every_worker.moe_a2a_backend != "none"
        and min(every_worker.attn_dp_size, every_worker.ep_size) == 1
    ):
        others.append(f"--moe-a2a-backend (only with {DP_ATTENTION} and --ep-size)")
    return [*worker_flags.without_effect(namespace), *others]


def _check_ray(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> None:
    if "://" in namespace.ray_address:
        parser.error(
            f"--ray-address {namespace.ray_address}: give HOST:PORT of the head node; the launcher runs on a node of the "
            "cluster"
        )
    for flag, is_set in (
        ("--node-rank", namespace.node_rank),
        ("--dist-init-addr", namespace.dist_init_addr),
        ("--base-gpu-id", namespace.base_gpu_id),
    ):
        if is_set:
            parser.error(f"{flag}: with --use-ray Ray chooses nodes and GPUs; leave it out")


def _check_dp_attention(
    parser: argparse.ArgumentParser, config: WorkerConfig, *, uses_ray: bool
) -> None:
    for flag, is_set, remedy in (
        ("--dp-size 1", config.attn_dp_size == 1, "give the number of DP ranks, 2 or more"),
        ("--enable-torch-compile", config.enable_torch_compile, "leave it out"),
        (
            "--use-ray",
            uses_ray,
            "Ray places single workers; leave it out, and start the nodes by --nnodes",
        ),
    ):
        if is_set:
            parser.error(f"{DP_ATTENTION} with {flag}: {remedy}")


def with_launcher_flags(message: str) -> str:
    """Returns a message of the router with its flags in the spelling of this command line."""
    return re.sub(
        r"--([a-z][a-z-]*)",
        lambda flag: _flag(flag[1]),
        message,
    )


def _add_launch_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", help="address of the router (default: %(default)s)"
    )
    group.add_argument(
        "--port",
        type=_port,
        default=30000,
        metavar="INT",
        help="port of the router; 0: any free one (default: %(default)s)",
    )
    group.add_argument(
        *DP_SIZE,
        type=_at_least_one,
        default=1,
        metavar="INT",
        help="number of workers, each with a copy of the model; with --enable-dp-attention: number of DP ranks "
        "(default: %(default)s)",
    )
    group.add_argument(
        DP_ATTENTION,
        action="store_true",
        help="DP attention, for models with routed experts: each of the --dp-size workers (DP ranks) has --tp-size / "
        "--dp-size ranks and its own requests, attention and KV cache, and all share one copy of the routed experts; they "
        "start and end together",
    )
    group.add_argument(
        "--router-dp-worker-base-port",
        type=_port,
        default=31000,
        metavar="INT",
        help="port of the first worker; ports in use are skipped (default: %(default)s)",
    )
    group.add_argument(
        "--use-ray",
        action="store_true",
        help="start the workers on the nodes of a Ray cluster, which reserves their GPUs (with --device cpu, "
        "--cpu-threads cores each); this machine must be a node of it. Workers that have no room yet start when nodes join",
    )
    group.add_argument(
        "--ray-address",
        default="",
        metavar="HOST:PORT",
        help="the Ray cluster; auto: RAY_ADDRESS, or the one of this machine (default: auto)",
    )


def _add_router_flag(group: argparse._ArgumentGroup, flag: Mapping[str, Any]) -> None:
    # argparse reads % as the start of a format.
    text = with_launcher_flags(flag["help"]).replace("%", "%%")
    name, dest = _flag(flag["name"]), _dest(flag["name"])
    if flag["value_name"] is None:
        group.add_argument(name, dest=dest, action="store_true", help=text)
        return
    if flag["default"]:
        text += f" (default: {flag['default']})".replace("%", "%%")
    group.add_argument(
        name,
        dest=dest,
        nargs=flag["nargs"],
        choices=flag["choices"] or None,
        metavar=None if flag["choices"] else flag["value_name"],
        help=text,
    )


def _flag(router_flag: str) -> str:
    """Returns the spelling of a router's flag on this command line."""
    prefix = "--" if router_flag in LAUNCHERS | WITHOUT_PREFIX else "--router-"
    return prefix + router_flag


def _dest(router_flag: str) -> str:
    return "router_" + router_flag.replace("-", "_")


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give 0 to 65535")
    return int(text)


def _at_least_one(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 on")
    return int(text)
