"""Which rows of a step want what: found on the host, so that nothing is computed for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mla_router.worker.core import Admitted, SamplingParams, StepPlan
from mla_router.worker.engine.sampling.filters import SHORTLIST

_FOR_EVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of a step, indices into `StepPlan.sampled_slots`, ascending, int64."""

    num_greedy: int
    penalized: np.ndarray
    biased: np.ndarray
    plain: np.ndarray  # drawn from the whole vocabulary
    shortlisted: np.ndarray  # drawn under a small top_k, and maybe a top_p
    sorted: np.ndarray  # drawn under another top_k or top_p
    scored: np.ndarray
    min_p: bool  # some row has it
    num_top: np.ndarray  # top_logprobs of the scored rows


class SlotWants:
    """What each slot's request wants, on the host."""

    def __init__(self, num_slots: int) -> None:
        self._wants = np.zeros((6, num_slots), dtype=np.bool_)  # rows: see `_wants`
        self._biased_until = np.zeros(num_slots, dtype=np.int64)  # position
        self._num_top = np.zeros(num_slots, dtype=np.int64)

    def admit(self, requests: Sequence[Admitted]) -> None:
        for request in requests:
            slot, sampling = request.slot, request.sampling
            self._wants[:, slot] = _wants(sampling)
            self._num_top[slot] = sampling.top_logprobs
            self._biased_until[slot] = (
                _FOR_EVER if sampling.logit_bias else len(request.prompt) + sampling.min_tokens
            )

    def num_top(self, slot: int) -> int:
        return int(self._num_top[slot])

    def groups(self, plan: StepPlan) -> Groups:
        slots = np.array(plan.sampled_slots, dtype=np.int64)
        ends = [chunk.start + len(chunk.tokens) for chunk in plan.chunks if chunk.is_last]
        positions = np.array([*plan.decode_lengths, *ends], dtype=np.int64)  # of the new tokens
        penalized, plain, shortlisted, ordered, min_p, scored = map(
            np.flatnonzero, self._wants[:, slots]
        )
        return Groups(
            num_greedy=len(slots) - len(plain) - len(shortlisted) - len(ordered),
            penalized=penalized,
            biased=np.flatnonzero(positions < self._biased_until[slots]),
            plain=plain,
            shortlisted=shortlisted,
            sorted=ordered,
            scored=scored,
            min_p=len(min_p) > 0,
            num_top=self._num_top[slots[scored]],
        )


def _wants(sampling: SamplingParams) -> tuple[bool, ...]:
    drawn = not sampling.greedy
    top = drawn and (sampling.top_k > 0 or sampling.top_p < 1)
    short = 1 <= sampling.top_k <= SHORTLIST
    return (
        sampling.penalized,
        drawn and not top,
        top and short,
        top and not short,
        drawn and sampling.min_p > 0,
        sampling.logprobs,
    )
