"""A fake engine whose steps take virtual seconds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import StepPlan
from support.fake_engine import FakeEngine, FakeStep


class TimedEngine(FakeEngine):
    """Computes the time of a step from its chunks and rows. `slowdown` may change at any time."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        step_s: float = 0.005,
        token_s: float = 0.0008,
        context_s: float = 0.0000002,
        prefix_s: float = 0.000007,
    ) -> None:
        super().__init__(capacity)
        self.step_s, self.token_s = step_s, token_s
        self.context_s, self.prefix_s = context_s, prefix_s
        self.cache = defaultdict(int)  # the first steps read unwritten locations
        self.slowdown = 1.0
        self.steps: list[tuple[StepPlan, float]] = []  # plans and seconds

    def seconds(self, plan: StepPlan) -> float:
        seconds = self.step_s + 0.0001 * len(plan.decode_slots)
        for chunk in plan.chunks:
            tokens = len(chunk.tokens)
            seconds += chunk.start * self.prefix_s
            seconds += tokens * (self.token_s + (chunk.start + tokens / 2) * self.context_s)
        return self.slowdown * seconds

    def _run(self, step: FakeStep) -> None:
        super()._run(step)
        assert step.result is not None
        seconds = self.seconds(step.plan)
        self.steps.append((step.plan, seconds))
        step.result = replace(step.result, seconds=seconds)
