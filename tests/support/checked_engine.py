"""An engine that compares the lengths on the device with those of each plan."""

from __future__ import annotations

from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.runners.outputs import ForwardOutput
from mla_router.worker.step.plan import StepPlan


class CheckedEngine(Engine):
    def forward(self, plan: StepPlan) -> ForwardOutput:
        launched = super().forward(plan)
        self.slots.check(plan)
        return launched
