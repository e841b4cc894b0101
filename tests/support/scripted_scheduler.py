"""A scheduler with a scripted server: messages at given steps, and the scheduler's replies."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mla_router.worker.config import WorkerConfig
from mla_router.worker.generation import SamplingParams
from mla_router.worker.grammar.pool import GrammarPool
from mla_router.worker.messages import (
    Delta,
    Deltas,
    Generate,
    Shutdown,
    ToScheduler,
    ToServer,
)
from mla_router.worker.scheduler.lockstep import StepGroup
from mla_router.worker.scheduler.scheduler import Scheduler
from mla_router.worker.step.engine import Capacity, StepEngine, StepSeconds
from support.fake_engine import VOCAB, FakeEngine


def generate(rid: str, prompt: list[int], max_tokens: int = 4, **fields: object) -> Generate:
    """Returns a request as the server sends it. `fields`: those of `Generate` or `SamplingParams`."""
    own = {name: fields.pop(name) for name in Generate.__struct_fields__ if name in fields}
    sampling = SamplingParams(max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    return Generate(rid, prompt, sampling, **own)  # type: ignore[arg-type]


@dataclass
class ScriptedChannel:
    """Delivers `script[i]` at the i-th receive, then stops the scheduler once it is idle."""

    script: dict[int, list[ToScheduler]]
    said: list[ToServer] = field(default_factory=list)
    when: list[int] = field(default_factory=list)  # number of the receive before it
    now: int = 0
    is_idle: Callable[[], bool] = lambda: True
    num_servers: int = 1

    def receive(self, timeout_s: float) -> list[ToScheduler]:
        messages = self.script.pop(self.now, [])
        self.now += 1
        if timeout_s > 0 and not messages and not self.is_idle():
            time.sleep(timeout_s)  # a grammar compiles
        elif timeout_s > 0 and not messages:  # idle: the scheduler waits for the next message
            if not self.script:
                return [Shutdown()]
            self.now = min(self.script)
            return self.receive(timeout_s)
        return messages

    def send(self, message: ToServer, server: int | None = None) -> None:  # noqa: ARG002 (one)
        self.said.append(message)
        self.when.append(self.now)

    def all_deltas(self) -> list[Delta]:
        return [d for said in self.said if isinstance(said, Deltas) for d in said.items]

    def deltas(self) -> dict[str, list[Delta]]:
        by_rid: dict[str, list[Delta]] = defaultdict(list)
        for delta in self.all_deltas():
            by_rid[delta.rid].append(delta)
        return by_rid

    def tokens(self, rid: str) -> list[int]:
        return [token for delta in self.deltas()[rid] for token in delta.token_ids]

    def turns(self, rid: str) -> list[int]:
        """Returns the receives before each delta of this request."""
        return [
            now
            for said, now in zip(self.said, self.when, strict=True)
            if isinstance(said, Deltas) and any(delta.rid == rid for delta in said.items)
        ]

    def reason(self, rid: str) -> str:
        reasons = [delta.finish_reason for delta in self.deltas()[rid] if delta.finish_reason]
        assert len(reasons) == 1, f"{rid} ended {len(reasons)} times"
        return reasons[0]


@dataclass
class Run:
    scheduler: Scheduler
    channel: ScriptedChannel


def run(
    script: dict[int, list[ToScheduler]],
    *,
    overlap: bool = True,
    capacity: Capacity | None = None,
    chunk_size: int = 64,
    use_prefix_cache: bool = True,
    engine: StepEngine[Any] | None = None,
    vocab_size: int = VOCAB,
    grammars: GrammarPool | None = None,
    measured: StepSeconds | None = None,
    group: StepGroup | None = None,
    **settings: Any,
) -> Run:
    """Runs a scheduler over a script until it is idle, and checks its memory at every step. `measured`: the
    times of the engine's first steps; `group`: the schedulers of other DP ranks; `settings`: fields of WorkerConfig."""
    capacity = capacity or Capacity(num_pages=64, page_size=4, num_slots=8, context_length=128)
    engine = engine or FakeEngine(capacity)
    channel = ScriptedChannel(dict(script))
    scheduler = Scheduler(
        engine,
        channel,
        WorkerConfig(
            chunked_prefill_size=chunk_size,
            max_prefill_tokens=settings.pop("max_prefill_tokens", chunk_size),
            disable_radix_cache=not use_prefix_cache,
            **settings,
        ),
        vocab_size=vocab_size,
        grammars=grammars,
        group=group,
    )
    if measured is not None:
        scheduler.planner.step_time.calibrate(measured)
    channel.is_idle = lambda: not scheduler.requests
    postprocess = scheduler.postprocess

    def checked(last: object) -> None:
        postprocess(last)  # type: ignore[arg-type]
        scheduler.memory.check(list(scheduler.requests.values()))

    scheduler.postprocess = checked  # type: ignore[method-assign]
    (scheduler.overlap_loop if overlap else scheduler.normal_loop)()
    return Run(scheduler, channel)


def assert_nothing_is_allocated(outcome: Run) -> None:
    """Asserts that each page and slot is free, or cached without a request that uses it."""
    stats = outcome.scheduler.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_slots == stats.total_slots
    assert stats.free_pages + stats.cached_pages == stats.total_pages
    outcome.scheduler.memory.flush_cache()
    assert outcome.scheduler.stats().free_pages == stats.total_pages
