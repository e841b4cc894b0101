"""The process of a rank other than 0: an engine that repeats the calls of rank 0.

    python -m mla_router.worker.ranks [flags of a worker] --rank N --ipc-dir DIR --parent-pid PID --heartbeat-fd FD ...

The first API process of the worker starts it, and it ends with that process.
"""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
from pathlib import Path
from typing import NoReturn

from setproctitle import setproctitle

from mla_router.worker import flags, logs
from mla_router.worker.child import die_with_parent
from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.mask_memory import MaskMemory

EXIT_FAILED = 1
EXIT_BAD_SETTINGS = 2

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    # These signals reach the whole process group. The first API process decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="mla_router.worker.ranks")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ipc-dir", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--heartbeat-fd", type=int, required=True)
    parser.add_argument("--store-fd", type=int, required=True)
    parser.add_argument("--masks-fd", type=int, required=True)
    flags.add_flags(parser)
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent_pid)
    rank = arguments.rank
    try:
        config = flags.from_namespace(arguments)
        logs.set_up(config.log_level, f"rank {rank}")
        setproctitle(f"mla_router rank {rank} {config.name}")
        leader = Heartbeat(arguments.heartbeat_fd)
        run(config, rank, arguments.ipc_dir, leader, arguments.store_fd, arguments.masks_fd)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    except Exception:
        # The calls after a failed one build on its results, so the rank cannot go on.
        logger.critical("this rank gives up", exc_info=True)
        return EXIT_FAILED


def run(
    config: WorkerConfig, rank: int, ipc_dir: Path, leader: Heartbeat, store: int, masks: int
) -> NoReturn:
    """Serves until the process ends. `leader`: the heartbeat of rank 0. `store` and `masks`: descriptors of the
    rendezvous store and of `MaskMemory`. Raises ConfigError, RanksError, CallError, and any error of a step."""
    # The import of torch takes seconds, so it follows the validation of the flags.
    from mla_router.worker.ranks.channel import CallReceiver
    from mla_router.worker.ranks.follower import Follower
    from mla_router.worker.ranks.load import load_rank
    from mla_router.worker.ranks.rendezvous import Rendezvous, store_path

    receiver = CallReceiver(ipc_dir, rank)
    path = store_path(store)
    rendezvous = Rendezvous(path, rank, config.tp_size, timeout_s=config.dist_timeout)
    rendezvous.all_arrived()
    engine = load_rank(config, rank, path)
    vocab_size = engine.model.config.vocab_size
    memory = MaskMemory(masks, config.max_running_requests, vocab_size)
    follower = Follower(engine, leader.of_rank(rank), leader, memory)
    engine.report_progress_within_steps(follower.beat)
    gc.collect()
    gc.freeze()  # the objects of the start stay: later collections skip them
    rendezvous.report_loaded()
    follower.run(receiver)


if __name__ == "__main__":
    sys.exit(main())
