"""A fake engine with scripted failures."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import StepPlan, TokenMasks
from mla_router.worker.step.result import NO_TOKEN, StepResult
from support.fake_engine import FakeEngine, FakeStep


class KernelFailed(Exception):
    """The error of a failed step."""


class FaultyEngine(FakeEngine):
    """Steps are counted from 0, in the order of `forward`."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        fail_forward: Collection[int] = (),
        fail_sample: Collection[int] = (),
        fail_wait: Collection[int] = (),
        no_token: Collection[tuple[int, int]] = (),  # (step, row)
        usable: bool = True,
    ) -> None:
        super().__init__(capacity)
        self.fail_forward = set(fail_forward)
        self.fail_sample = set(fail_sample)
        self.fail_wait = set(fail_wait)
        self.no_token = set(no_token)
        self.usable = usable
        self.plans: list[StepPlan] = []

    @property
    def last_fault(self) -> int:
        """Returns the last step that fails."""
        return max([-1, *self.fail_forward, *self.fail_sample, *self.fail_wait])

    def forward(self, plan: StepPlan) -> FakeStep:
        number = len(self.plans)
        self.plans.append(plan)
        if number in self.fail_forward:
            raise KernelFailed("forward")
        super().forward(plan)
        self.launched[-1] = FaultyStep(self, plan)
        return self.launched[-1]

    def sample(self, step: FakeStep, masks: TokenMasks | None = None) -> FakeStep:
        if self._number(step) in self.fail_sample:
            raise KernelFailed("sample")
        return super().sample(step, masks)

    def is_usable_after(self, error: Exception) -> bool:
        assert isinstance(error, KernelFailed)
        return self.usable

    def result_of(self, step: FaultyStep) -> StepResult:
        number = self._number(step)
        result = FakeStep.wait(step)
        if number in self.fail_wait:
            raise KernelFailed("wait")
        lost = {row for at, row in self.no_token if at == number}
        tokens = [
            [*some[:-1], NO_TOKEN] if row in lost else some
            for row, some in enumerate(result.tokens)
        ]
        return replace(result, tokens=tokens)

    def _number(self, step: FakeStep) -> int:
        return next(i for i, plan in enumerate(self.plans) if plan is step.plan)


@dataclass
class FaultyStep(FakeStep):
    """A step whose result may fail."""

    def wait(self) -> StepResult:
        assert isinstance(self.engine, FaultyEngine)
        return self.engine.result_of(self)
