"""A step of the loop, from its plan to its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mla_router.worker.scheduler.request import Request
from mla_router.worker.step.engine import PendingStep
from mla_router.worker.step.plan import StepPlan


@dataclass(slots=True, eq=False)
class Step:
    """A plan, its requests, and the engine's results so far."""

    plan: StepPlan
    prefills: list[Request]  # aligned with plan.chunks
    sampled: list[Request]  # aligned with plan.sampled_slots
    predicted_s: float = 0.0  # predicted time on the device
    tower_s: float = field(init=False)  # predicted time of images before the step
    is_typical: bool = True  # False: its time depends on the step of another DP rank
    forward_output: Any = field(default=None, init=False)  # of engine.forward
    pending: PendingStep | None = field(default=None, init=False)  # of engine.sample
    # By request with a bitmask: maximum number of tokens that the step gives, once it is sampled
    mask_limits: dict[Request, int] = field(default_factory=dict, init=False)
    # By request: the tokens that its grammar forces after the token that this step samples.
    forced_tokens: dict[Request, list[int]] = field(default_factory=dict, init=False)

    @property
    def decodes(self) -> list[Request]:
        """The decoding requests, aligned with plan.decode_slots."""
        return self.sampled[: len(self.plan.decode_slots)]

    def token_limit(self, request: Request) -> int:
        """Returns the maximum number of tokens that the step gives to one of `decodes`."""
        return self.mask_limits.get(request) or request.tokens_in(self.plan)

    @property
    def needs_masks(self) -> bool:
        """Whether the token bitmask of a row depends on the tokens of the previous step. All other state of the
        sampling is on the device, so steps without bitmasks are sampled right after their launch."""
        return any(request.grammar is not None for request in self.sampled)
