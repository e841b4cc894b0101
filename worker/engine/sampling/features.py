"""The features of sampling that each row of a step uses. The host knows them, so the device computes a feature only
for the rows that use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mla_router.worker.engine.sampling.bias import FOR_EVER
from mla_router.worker.generation import SamplingParams
from mla_router.worker.step.plan import Admitted, StepPlan


@dataclass(frozen=True, slots=True)
class RowFeatures:
    """The rows of a step that use each feature: ascending indices into `StepPlan.sampled_slots`, int64."""

    penalized: np.ndarray
    biased: np.ndarray
    restricted: np.ndarray  # by `SamplingParams.allowed`
    with_logprobs: np.ndarray
    num_top: np.ndarray  # top_logprobs of the rows with logprobs
    filtered: bool  # any row has top_k, top_p or min_p


class SlotFeatures:
    """The features that each slot's request uses, on the host."""

    def __init__(self, num_slots: int, num_drafts: int = 0) -> None:
        # Maximum number of tokens by which a bound of a plan is larger than the position of the next token: the step
        # before the plan may give as few as one token, and so may the plan's own
        self._most_ahead = 2 * num_drafts
        self._flags = np.zeros((4, num_slots), dtype=np.bool_)  # a row for each value of `_flags`
        self._biased_until = np.zeros(num_slots, dtype=np.int64)  # first bound without a bias
        self._num_top = np.zeros(num_slots, dtype=np.int64)

    def admit(self, requests: Sequence[Admitted]) -> None:
        for request in requests:
            slot, sampling = request.slot, request.sampling
            self._flags[:, slot] = _flags(sampling)
            self._num_top[slot] = sampling.top_logprobs
            until = 0
            if sampling.logit_bias:
                until = FOR_EVER
            elif sampling.min_tokens:
                until = len(request.prompt) + sampling.min_tokens + self._most_ahead
            self._biased_until[slot] = until

    def num_top(self, slot: int) -> int:
        return int(self._num_top[slot])

    def of(self, plan: StepPlan) -> RowFeatures:
        slots = np.array(plan.sampled_slots, dtype=np.int64)
        ends = [chunk.start + len(chunk.tokens) for chunk in plan.chunks if chunk.is_last]
        # Upper bounds of the new tokens' positions
        positions = np.array([*plan.decode_bounds, *ends], dtype=np.int64)
        penalized, filtered, with_logprobs, restricted = self._flags[:, slots]
        rows_with_logprobs = np.flatnonzero(with_logprobs)
        return RowFeatures(
            penalized=np.flatnonzero(penalized),
            biased=np.flatnonzero(positions < self._biased_until[slots]),
            restricted=np.flatnonzero(restricted),
            with_logprobs=rows_with_logprobs,
            num_top=self._num_top[slots[rows_with_logprobs]],
            filtered=bool(filtered.any()),
        )


def _flags(sampling: SamplingParams) -> tuple[bool, ...]:
    """Returns whether a request is penalized, filtered, with logprobs, restricted."""
    filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return (
        sampling.penalized,
        filtered and not sampling.greedy,
        sampling.logprobs,
        bool(sampling.allowed),
    )
