"""One token for every sampled row of a step, and its logprobs, without waiting for the device.

What is done to a row's logits, in this order: the tokens that the request is restricted to; the grammar's mask;
logit_bias and the ban of stop tokens until min_tokens; repetition, then frequency and presence penalty; temperature;
top_k, top_p and min_p. Greedy rows skip the last four. All before the temperature run over the rows that want them
and over no others. A forbidden token stays so whatever is added to its logit, so masks may come first: logprobs are
taken behind them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from mla_router.worker.core import Admitted, StepPlan, TokenMasks
from mla_router.worker.engine.sampling.allowed import AllowedTokens
from mla_router.worker.engine.sampling.bias import LogitBias
from mla_router.worker.engine.sampling.groups import SlotWants
from mla_router.worker.engine.sampling.logprobs import RowLogprobs, Run, token_logprobs
from mla_router.worker.engine.sampling.masks import forbid
from mla_router.worker.engine.sampling.penalties import TokenCounts
from mla_router.worker.engine.sampling.settings import SlotSettings
from mla_router.worker.engine.upload import Upload
from mla_router.worker.kernels.sampling.sample import sample
from mla_router.worker.kernels.sampling.top_threshold import top_threshold

# Rows whose logits are changed at a time: it bounds the temporaries.
_SLICE_ROWS = 256


class Sampler:
    """The sampling state of all slots, and its use."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.wants = SlotWants(num_slots)
        self._settings = SlotSettings(num_slots, device)
        self._counts = TokenCounts(num_slots, vocab_size, device)
        self._bias = LogitBias(num_slots, device)
        self._allowed = AllowedTokens(num_slots, vocab_size, device)
        self._upload = Upload(device)

    @property
    def penalty_bytes(self) -> int:
        """Of device memory, taken by the counts of tokens that occurred."""
        return self._counts.num_bytes_taken

    def admit(self, requests: tuple[Admitted, ...]) -> None:
        """Take in the settings, and the tokens so far, of requests that take a slot."""
        if not requests:
            return
        self.wants.admit(requests)
        self._settings.admit(requests)
        if penalized := [r for r in requests if r.sampling.penalized]:
            self._counts.admit(penalized)
        if biased := [r for r in requests if r.sampling.logit_bias or r.sampling.min_tokens]:
            self._bias.admit(biased)
        if restricted := [r for r in requests if r.sampling.allowed]:
            self._allowed.admit(restricted)

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        plan: StepPlan,
        masks: TokenMasks | None,
        *,
        last_token: Tensor,
        out: Tensor,
    ) -> RowLogprobs | None:
        """`logits` [R, V] float32 of the plan's sampled rows are written over; `slots` and
        `positions` [R] int64 are theirs, the latter of the tokens about to be sampled. These are written to
        `out` [R] int32 and, by slot, to `last_token`: NO_TOKEN, or 0, where there was none to draw."""
        groups = self.wants.groups(plan)
        penalized, biased, restricted, with_logprobs, masked, bits = self._upload(
            [
                groups.penalized,
                groups.biased,
                groups.restricted,
                groups.with_logprobs,
                np.array(masks.rows if masks else (), dtype=np.int64),
                masks.bits if masks else np.zeros((0, 0), dtype=np.int32),
            ]
        )
        for rows in _slices(restricted):
            _put(logits, rows, forbid(_get(logits, rows), self._allowed.of(slots[rows])))
        for rows, some_bits in zip(_slices(masked), torch.split(bits, _SLICE_ROWS), strict=False):
            _put(logits, rows, forbid(_get(logits, rows), some_bits))
        own = (
            logits.index_select(0, with_logprobs) if len(with_logprobs) else None
        )  # of what may be sampled
        for rows in _slices(biased):
            _put(logits, rows, self._bias.add(_get(logits, rows), slots[rows], positions[rows]))
        for rows in _slices(penalized):
            own_settings = self._settings.of(slots[rows])
            _put(logits, rows, self._counts.penalize(_get(logits, rows), slots[rows], own_settings))

        threshold = None
        if groups.filtered:
            own_settings = self._settings.of(slots)
            threshold = top_threshold(
                logits,
                own_settings.temperature,
                own_settings.top_k,
                own_settings.top_p,
                own_settings.min_p,
            )
        temperature, seed = self._settings.temperature, self._settings.seed
        sample(logits, slots, positions, temperature, seed, threshold, last_token, out)
        if len(penalized):
            owners = slots[penalized]
            self._counts.add(owners, last_token[owners])
        if own is None:
            return None
        runs = [
            Run(row, 1, top)
            for row, top in zip(groups.with_logprobs.tolist(), groups.num_top.tolist(), strict=True)
        ]
        return token_logprobs(own, last_token[slots[with_logprobs]], runs)


def _slices(rows: Tensor) -> Iterator[Tensor]:
    return iter(torch.split(rows, _SLICE_ROWS) if len(rows) else ())


# Rows are distinct and ascending: as many as there are means all of them, as they lie.


def _get(logits: Tensor, rows: Tensor) -> Tensor:
    return logits if len(rows) == len(logits) else logits.index_select(0, rows)


def _put(logits: Tensor, rows: Tensor, values: Tensor) -> None:
    if values is not logits:
        logits.index_copy_(0, rows, values)
