"""The process of a rank other than 0: an engine that repeats the calls of rank 0.

    python -m mla_router.worker.ranks [flags of a worker] --rank N --parent-pid PID --heartbeat-fd FD ...

The first API process of the worker starts it, or the launcher on a node other than 0. It ends with that process.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from pathlib import Path
from typing import NoReturn

from setproctitle import setproctitle

from mla_router.worker import flags, logs
from mla_router.worker.child import die_with_parent, ignore_stop_signals
from mla_router.worker.config import EXIT_BAD_SETTINGS, ConfigError, WorkerConfig
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.lasting_imports import lasting_imports
from mla_router.worker.mask_memory import MaskMemory
from mla_router.worker.ranks import rendezvous_flags

EXIT_FAILED = 1

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    ignore_stop_signals()
    parser = argparse.ArgumentParser(prog="mla_router.worker.ranks")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ipc-dir", type=Path, help="folder of the sockets, on node 0")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--heartbeat-fd", type=int, required=True)
    rendezvous_flags.add(parser)
    flags.add_flags(parser)
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent_pid)
    rank = arguments.rank
    try:
        config = flags.from_namespace(arguments)
        logs.set_up(config.log_level, f"rank {rank}")
        setproctitle(f"mla_router rank {rank} {config.name}")
        leader = Heartbeat(arguments.heartbeat_fd, config.ranks.start)
        run(config, rank, arguments, leader)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    except Exception:
        # The calls after a failed one build on its results, so the rank cannot go on.
        logger.critical("this rank gives up", exc_info=True)
        return EXIT_FAILED


def run(
    config: WorkerConfig, rank: int, arguments: argparse.Namespace, leader: Heartbeat
) -> NoReturn:
    """Serves until the process ends. `leader`: the heartbeat of the scheduler. Raises ConfigError, RanksError,
    CallError, and any error of a step."""
    with lasting_imports():
        # The import of torch takes seconds, so it follows the validation of the flags.
        from mla_router.worker.ranks.channel import CallReceiver
        from mla_router.worker.ranks.follower import Follower
        from mla_router.worker.ranks.load import arrive, endpoint_of, load_rank
        from mla_router.worker.ranks.remote_calls import RemoteReceiver, SessionKeys

    location = rendezvous_flags.store_location(arguments)
    assert location is not None, "a rank other than 0 has a rendezvous"
    is_near = config.leads_here
    receiver: CallReceiver | RemoteReceiver
    if is_near:
        receiver = CallReceiver(arguments.ipc_dir, rank - config.ranks.start)
    store = location.open(rank, config.dist_timeout)
    rendezvous = arrive(config, rank, store)
    rendezvous.all_arrived()
    engine = load_rank(config, rank, store, location.address)
    sizes = config.max_masks, engine.model.config.vocab_size
    if is_near:
        masks = MaskMemory(arguments.masks_fd, *sizes)
    else:
        assert location.session is not None, "a rank on another node"
        keys = SessionKeys(config.dist_key, location.session.id)
        masks = MaskMemory.create(*sizes)
        receiver = RemoteReceiver(rendezvous.told(endpoint_of(rank)), rank, keys, masks)
    follower = Follower(engine, leader.of_rank(rank), leader, masks)
    engine.report_progress_within_steps(follower.beat)
    gc.collect()
    gc.freeze()  # the objects of the start stay: later collections skip them
    rendezvous.report_loaded()
    follower.run(receiver)


if __name__ == "__main__":
    sys.exit(main())
