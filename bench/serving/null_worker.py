"""A worker with a real server, a real scheduler and an engine that computes nothing: tokens at a constant rate.

    python bench/serving/null_worker.py STEP_MS [flags of a worker]

The server process starts this file again as its scheduler.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass

from mla_router.worker import flags
from mla_router.worker.__main__ import main
from mla_router.worker.child import die_with_parent
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.messages import Ready
from mla_router.worker.scheduler.__main__ import flags_of_process
from mla_router.worker.scheduler.channel import ZmqChannel
from mla_router.worker.scheduler.scheduler import Scheduler
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import StepPlan, TokenMasks
from mla_router.worker.step.result import StepResult

VOCAB = 1024  # of the shipped small model
FIRST = 16  # lower ids are special tokens
CONTEXT_LENGTH = 8192


@dataclass
class Timed:
    """A step that ends when the device would end it."""

    result: StepResult
    ready_at: float

    def wait(self) -> StepResult:
        time.sleep(max(0.0, self.ready_at - time.monotonic()))
        return self.result


class PacedEngine:
    """An engine with a constant step time. Its tokens cycle through the vocabulary."""

    def __init__(self, capacity: Capacity, step_s: float) -> None:
        self.capacity = capacity
        self._step_s = step_s
        self._free_at = 0.0  # time at which the device has completed all launched steps
        self._steps = 0

    def forward(self, plan: StepPlan) -> StepPlan:
        return plan

    def sample(
        self,
        forward_output: StepPlan,
        masks: TokenMasks | None = None,  # noqa: ARG002 (nobody asks for a grammar)
    ) -> Timed:
        self._free_at = max(self._free_at, time.monotonic()) + self._step_s
        self._steps += 1
        rows = len(forward_output.decode_slots) + sum(
            chunk.is_last for chunk in forward_output.chunks
        )
        # 7919 is a prime: consecutive steps and adjacent rows get different tokens.
        tokens = [[FIRST + (self._steps + row) * 7919 % (VOCAB - FIRST)] for row in range(rows)]
        return Timed(StepResult(tokens), self._free_at)

    def is_usable_after(self, error: Exception) -> bool:
        raise error


def schedule(step_s: float, argv: list[str]) -> None:
    """Runs the scheduler process."""
    arguments = flags_of_process().parse_args(argv)
    die_with_parent(arguments.parent_pid)
    config = flags.from_namespace(arguments)
    slots = config.max_running_requests
    capacity = Capacity(
        slots * CONTEXT_LENGTH // config.page_size, config.page_size, slots, CONTEXT_LENGTH
    )
    channel = ZmqChannel(arguments.ipc_dir, config.tokenizer_worker_num or 1)
    heartbeat = Heartbeat(arguments.heartbeat_fd)
    scheduler = Scheduler(
        PacedEngine(capacity, step_s), channel, config, vocab_size=VOCAB, heartbeat=heartbeat
    )
    channel.send(
        Ready(
            capacity.max_total_tokens,
            config.page_size,
            slots,
            CONTEXT_LENGTH,
            VOCAB,
            "none",
            "none",
            "none",
            "none",
        )
    )
    gc.collect()
    gc.freeze()
    heartbeat.start()
    scheduler.overlap_loop()
    channel.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["schedule", step_ms, *argv]:
            schedule(float(step_ms) / 1000, argv)
        case [step_ms, *argv] if step_ms.replace(".", "", 1).isdecimal():
            sys.exit(main(argv, [sys.executable, __file__, "schedule", step_ms]))
        case _:
            sys.exit(__doc__)
