"""`python -m mla_router.worker`: one worker. This process is its first API process and starts the others."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from setproctitle import setproctitle

from mla_router import __version__
from mla_router.worker import flags, preflight
from mla_router.worker.child import die_with_parent
from mla_router.worker.config import EXIT_BAD_SETTINGS, ConfigError, WorkerConfig
from mla_router.worker.dp_group import DpGroup
from mla_router.worker.model_folder import locate
from mla_router.worker.server.processes.setup import set_up

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
RANK = (sys.executable, "-u", "-m", "mla_router.worker.ranks")
SCHEDULER = (sys.executable, "-u", "-m", "mla_router.worker.scheduler")

log = logging.getLogger(__name__)


def worker_parser() -> flags.Parser:
    """Returns the command line of a worker."""
    parser = flags.Parser(
        "python -m mla_router.launch_worker",
        "[--model-path DIR_OR_NAME] [--port N] [flag ...]",
        "Serve one copy of a model over HTTP, with OpenAI's API. mla_router.launch_server starts several such "
        "workers and a router in front of them. Flags have SGLang's names; flags of SGLang that are not "
        "listed here are accepted if they change no answer.",
        examples=(
            ("the small model that the package ships, on the CPU", ""),
            (
                "a model of the Hugging Face Hub",
                "--model-path deepseek-ai/DeepSeek-V2-Lite --port 31000",
            ),
            (
                "with a key that no other user can see",
                "--host 0.0.0.0   # after: export MLA_ROUTER_API_KEY=...",
            ),
        ),
    )
    parser.add_argument("--version", action="version", version=__version__)
    # The process id of the launcher, the parent: the worker ends with it.
    parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    # A DpGroup as JSON, from the launcher
    parser.add_argument("--dp-group", help=argparse.SUPPRESS)
    flags.add_flags(parser)
    return parser


def main(
    argv: Sequence[str] | None = None,
    scheduler: Sequence[str] = SCHEDULER,
    rank: Sequence[str] = RANK,
) -> int:
    """Runs a worker until a signal ends it. Returns the exit status. `scheduler` and `rank` are the commands of a
    scheduler and of another rank."""
    arguments = worker_parser().parse_args(argv)
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    try:
        config = _checked_config(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    set_up(config)
    _warn(config, flags.without_effect(arguments))
    # These imports take a second, so they follow the check of the flags.
    from mla_router.worker.server.processes import first
    from mla_router.worker.server.processes.listeners import listen
    from mla_router.worker.server.processes.serving import EXIT_FAILED

    try:
        listeners, config = listen(config)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason += "; give another --port, or --port 0 for any free one"
        print(f"error: --host {config.host} --port {config.port}: {reason}", file=sys.stderr)
        return EXIT_FAILED
    setproctitle(f"mla_router server {config.name}")
    with ExitStack() as opened:
        for listener in listeners:
            opened.enter_context(listener)
        try:
            group = DpGroup.of_flag(arguments.dp_group)
            return asyncio.run(first.run(config, listeners, scheduler, rank, group))
        except ConfigError as error:  # --dist-init-addr
            print(f"error: {error}", file=sys.stderr)
            return EXIT_BAD_SETTINGS


def _checked_config(arguments: argparse.Namespace) -> WorkerConfig:
    """Returns the settings, with local folders. Raises ConfigError."""
    config = locate(flags.from_namespace(arguments))
    if config.node_rank and arguments.dp_group is None:
        raise ConfigError(
            f"--node-rank {config.node_rank}: this node has no worker of its own; start mla_router.launch_server here"
        )
    preflight.check(config)
    return config


def _warn(config: WorkerConfig, ignored: Sequence[str]) -> None:
    """Logs settings that may surprise. `ignored`: flags without effect."""
    if ignored:
        log.warning("without effect here: %s", ", ".join(ignored))
    if not config.api_key and config.host not in _LOOPBACK:
        log.warning(
            "without a key, every client that can reach %s can use this worker: set MLA_ROUTER_API_KEY",
            config.host,
        )


if __name__ == "__main__":
    sys.exit(main())
