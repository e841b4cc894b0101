"""One step of the loop, from its plan to its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mla_router.worker.core import PendingStep, StepPlan
from mla_router.worker.scheduler.request import Request


@dataclass(slots=True, eq=False)
class Step:
    """A plan, the requests it names, and what the engine has returned for it so far."""

    plan: StepPlan
    prefills: list[Request]  # aligned with plan.chunks
    sampled: list[Request]  # aligned with plan.sampled_slots
    forward_output: Any = field(default=None, init=False)  # of engine.forward
    pending: PendingStep | None = field(default=None, init=False)  # of engine.sample
    # Tokens that are known to follow the one that the step samples for a request.
    following: dict[Request, list[int]] = field(default_factory=dict, init=False)

    @property
    def decodes(self) -> list[Request]:
        """Aligned with plan.decode_slots."""
        return self.sampled[: len(self.plan.decode_slots)]

    @property
    def needs_masks(self) -> bool:
        """What some row may draw depends on what the step before has sampled. All other state that
        sampling needs is on the device, so that other steps are sampled as soon as launched."""
        return any(request.grammar is not None for request in self.sampled)
