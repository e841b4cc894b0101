"""`python -m mla_router.worker`: one worker, a server process that starts its scheduler process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from setproctitle import setproctitle

from mla_router.worker import config as worker_config
from mla_router.worker.child import die_with_parent
from mla_router.worker.config import ConfigError

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

    if config.tokenizer_worker_num > 1:
        print(
            f"error: --tokenizer-worker-num {config.tokenizer_worker_num}: only 1 works yet",
            file=sys.stderr,
        )
        return EXIT_BAD_FLAGS

    # This process never computes. transformers would import torch because it is there, which
    # takes seconds and 400 MB; None in this place says that it is not.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    # Prompts are tokenized one by one: a pool of threads would only add a switch to it and back. The
    # library reads this itself, and has no other switch.
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("transformers").addFilter(_is_news)
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(message)s")

    # Only now, when the flags are known to be good: these imports take a second.
    from mla_router.worker.server import process

    try:
        listener, config = process.listen(config)
    except OSError as error:
        reason = error.strerror or str(error)
        print(f"error: --host {config.host} --port {config.port}: {reason}", file=sys.stderr)
        return process.EXIT_FAILED
    setproctitle(f"mla_router server {config.name}")
    with listener:
        return asyncio.run(process.run(config, listener, scheduler))


def _is_news(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


if __name__ == "__main__":
    sys.exit(main())
