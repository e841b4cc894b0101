"""The scheduler process: owns the device, and receives messages from its server processes only.

    python -m mla_router.worker.scheduler --ipc-dir DIR --parent-pid PID [flags of a worker]

`python -m mla_router.worker` starts it, and it ends with that process.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from setproctitle import setproctitle

from mla_router.worker import flags, logs
from mla_router.worker.child import die_with_parent, ignore_stop_signals
from mla_router.worker.config import EXIT_BAD_SETTINGS, ConfigError, WorkerConfig
from mla_router.worker.dp_group import DpGroup, LocalMailbox, Mailbox
from mla_router.worker.grammar.options import GrammarOptions
from mla_router.worker.grammar.pool import GrammarPool
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.lasting_imports import lasting_imports
from mla_router.worker.messages import Ready
from mla_router.worker.ranks import rendezvous_flags
from mla_router.worker.ranks.errors import RanksError
from mla_router.worker.scheduler.channel import ZmqChannel
from mla_router.worker.scheduler.expert_recorder import Load
from mla_router.worker.scheduler.lockstep import Alone, Lockstep, StepGroup
from mla_router.worker.scheduler.scheduler import EngineFailed, Scheduler
from mla_router.worker.step.engine import StepEngine, StepSeconds

if TYPE_CHECKING:
    from mla_router.worker.engine.engine import Engine


def main(argv: list[str] | None = None) -> int:
    ignore_stop_signals()  # for the grammar workers as well
    arguments = flags_of_process().parse_args(argv)
    die_with_parent(arguments.parent_pid)
    try:
        config = flags.from_namespace(arguments)
        logs.set_up(config.log_level)
        setproctitle(f"mla_router scheduler {config.name}")
        heartbeat = (
            Heartbeat.create()
            if arguments.heartbeat_fd is None
            else Heartbeat(arguments.heartbeat_fd, config.ranks.start)
        )
        run(config, arguments, heartbeat)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    except (EngineFailed, RanksError):
        logging.getLogger(__name__).critical("the scheduler cannot continue", exc_info=True)
        return 1
    return 0


def flags_of_process() -> argparse.ArgumentParser:
    """Returns the parser of a scheduler process's flags, which the server process gives it."""
    parser = argparse.ArgumentParser(prog="mla_router.worker.scheduler")
    parser.add_argument("--ipc-dir", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int, help="end with this process")
    parser.add_argument("--heartbeat-fd", type=int, help="shared memory of the heartbeat")
    parser.add_argument("--dp-group", help="a DpGroup, as JSON")
    rendezvous_flags.add(parser)
    flags.add_flags(parser)
    return parser


def run(config: WorkerConfig, arguments: argparse.Namespace, heartbeat: Heartbeat) -> None:
    """Serves until `Shutdown`. Raises ConfigError, EngineFailed, RanksError."""
    with lasting_imports():
        # The import of torch takes seconds, so it follows the validation of the flags.
        from mla_router.worker.ranks.load import load_leader

    grammars = _start_grammars(config, arguments.masks_fd)
    ipc_dir = arguments.ipc_dir
    location = rendezvous_flags.store_location(arguments)
    engine, calls, remote = load_leader(config, ipc_dir, location)
    mailbox: Mailbox | None = remote
    dp_group = DpGroup.of_flag(arguments.dp_group)
    if dp_group is not None and mailbox is None:  # on one machine
        mailbox = LocalMailbox(dp_group, config.attn_dp_rank)
    group: StepGroup = Alone() if mailbox is None else Lockstep(mailbox, heartbeat)
    measured = _first_steps(engine, calls, config, group)
    wake = None if mailbox is None else mailbox.wake
    channel = ZmqChannel(ipc_dir, config.tokenizer_worker_num or 1, wake=wake)
    scheduler = Scheduler(
        calls,
        channel,
        config,
        vocab_size=engine.model.config.vocab_size,
        grammars=grammars,
        heartbeat=heartbeat,
        expert_load=_expert_load(engine),
        group=group,
    )
    engine.report_progress_within_steps(scheduler.report_progress)
    scheduler.planner.step_time.calibrate(measured)
    channel.send(_ready(engine))
    # All objects so far are permanent: later garbage collections in the middle of a step skip them.
    gc.collect()
    gc.freeze()
    if grammars is not None:
        grammars.processes.warm_up()  # after the weights, whose loading it would slow down
    heartbeat.start()
    try:
        (scheduler.normal_loop if config.disable_overlap_schedule else scheduler.overlap_loop)()
    finally:
        channel.close()
        if grammars is not None:
            grammars.shut_down()


def _ready(engine: Engine) -> Ready:
    capacity, model = engine.capacity, engine.model
    return Ready(
        max_total_num_tokens=capacity.max_total_tokens,
        page_size=capacity.page_size,
        max_running_requests=capacity.num_slots,
        context_length=capacity.context_length,
        vocab_size=model.config.vocab_size,
        device=str(engine.device),
        dtype=str(engine.dtype).removeprefix("torch."),
        kv_cache_dtype=str(engine.kv_cache_dtype).removeprefix("torch."),
        attention_backend=engine.attention.name,
        images=None if model.vision is None else model.vision.format,
    )


def _expert_load(engine: Engine) -> Load | None:
    """Returns a counter of the load of the experts; None if the load is not counted."""
    from mla_router.worker.model.expert_load import ExpertLoad

    model = engine.model
    if model.expert_counts is None or model.placement is None:
        return None
    return ExpertLoad(model.expert_counts, model.placement)


def _first_steps(
    engine: Engine, calls: StepEngine[Any], config: WorkerConfig, group: StepGroup
) -> StepSeconds:
    """Runs the first steps and returns their times. `calls`: `engine`, with the other ranks. Raises ConfigError if a step
    fails, because it would fail again at the next start, and EngineFailed if the device is lost."""
    from mla_router.worker.engine.first_steps import first_steps

    try:
        return first_steps(
            calls,
            vocab_size=engine.model.config.vocab_size,
            largest=min(config.chunk_size, config.max_prefill_tokens),
            largest_of_all=group.largest,
        )
    except Exception as error:
        logging.getLogger(__name__).error("the first step failed", exc_info=error)
        if not engine.is_usable_after(error):
            raise EngineFailed("the device is lost") from error
        raise ConfigError(
            f"--model-path {config.folder}: this model fails its first step: {type(error).__name__}: {error}"
        ) from error


def _start_grammars(config: WorkerConfig, masks: int | None) -> GrammarPool | None:
    """Starts the grammar pool, or returns None with --grammar-backend none. Must run after the import of torch, whose
    memory the grammar workers share, and before its first use, which starts threads."""
    from mla_router.worker.grammar import pool
    from mla_router.worker.model.config.fields import ModelError
    from mla_router.worker.model.config.read import read_config

    if config.grammar_backend == "none":
        return None
    try:
        vocab_size = read_config(config.folder).vocab_size
    except ModelError as error:
        raise ConfigError(f"--model-path {config.folder}: {error}") from error
    return pool.start(
        config.folder,
        vocab_size=vocab_size,
        max_rows=config.max_masks,
        options=GrammarOptions(
            any_whitespace=not config.constrained_json_disable_any_whitespace,
            jump_forward=not config.disable_jump_forward,
            tokenizer_folder=config.tokenizer_folder,
        ),
        masks_fd=masks,
    )


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    # The end of an interpreter with torch takes up to a second, for which the API process would wait.
    os._exit(status)
