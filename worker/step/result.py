"""The result of a step, which the scheduler gets from the engine."""

from __future__ import annotations

from dataclasses import dataclass

from mla_router.worker.generation import Logprobs

# In `StepResult.tokens`: the row has no token here, because its logits are NaN or its bitmask allows none.
NO_TOKEN = -1

# Fills the rest of a row whose step gave fewer tokens than the maximum; not in `StepResult`.
UNUSED = -2


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, aligned with `StepPlan.sampled_slots`.

    A decode row gives up to `Capacity.tokens_per_row` tokens, which may be none. A row of a chunk gives one.
    """

    tokens: list[list[int]]  # of each row, in order
    logprobs: list[Logprobs | None] | None = None  # of each row's tokens; None if no row has them
    prompt_logprobs: list[Logprobs | None] | None = None  # aligned with `StepPlan.chunks`
    # Time for which the device was busy with the step; None: not measured
    seconds: float | None = None
