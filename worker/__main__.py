"""`python -m mla_router.worker`: one worker, a server process that starts its other processes."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from setproctitle import setproctitle

from mla_router.worker import config as worker_config
from mla_router.worker.child import die_with_parent
from mla_router.worker.config import ConfigError
from mla_router.worker.server.setup import set_up

EXIT_BAD_FLAGS = 2
SCHEDULER = (sys.executable, "-u", "-m", "mla_router.worker.scheduler")


def main(argv: Sequence[str] | None = None, scheduler: Sequence[str] = SCHEDULER) -> int:
    """Run a worker until it is told to end; `scheduler` is the command that starts a scheduler."""
    parser = argparse.ArgumentParser(
        prog="python -m mla_router.worker", description="Serve one copy of a model over HTTP."
    )
    worker_config.add_flags(parser)
    parser.add_argument(
        "--parent-pid", type=int, help="end when this process, which must be the parent, ends"
    )
    arguments = parser.parse_args(argv)
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    try:
        config = worker_config.from_namespace(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_FLAGS

    set_up(config)
    # Only now, when the flags are known to be good: these imports take a second.
    from mla_router.worker.server import process
    from mla_router.worker.server.listeners import listen
    from mla_router.worker.server.serving import EXIT_FAILED

    try:
        listeners, config = listen(config)
    except OSError as error:
        reason = error.strerror or str(error)
        print(f"error: --host {config.host} --port {config.port}: {reason}", file=sys.stderr)
        return EXIT_FAILED
    setproctitle(f"mla_router server {config.name}")
    with ExitStack() as opened:
        for listener in listeners:
            opened.enter_context(listener)
        return asyncio.run(process.run(config, listeners, scheduler))


if __name__ == "__main__":
    sys.exit(main())
