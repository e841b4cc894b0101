"""Samples a token for each sampled row of a step, with its logprobs, without waiting for the device.

The logits of a row go through, in this order: the request's allowed tokens; the grammar's token bitmask; logit_bias and
min_tokens; repetition, frequency and presence penalty; temperature; top_k, top_p and min_p. Greedy rows skip the last
four. Each step before the temperature runs for the rows that use it only. Bitmasks come first because the logprobs are
computed after them: a masked token stays masked, for any number that is added to its logit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from mla_router.worker.core import Admitted, StepPlan, TokenMasks
from mla_router.worker.engine.sampling.allowed import AllowedTokens
from mla_router.worker.engine.sampling.bias import LogitBias
from mla_router.worker.engine.sampling.bitmask import apply_token_bitmask
from mla_router.worker.engine.sampling.features import SlotFeatures
from mla_router.worker.engine.sampling.logprobs import RowLogprobs, Run, token_logprobs
from mla_router.worker.engine.sampling.params import SlotSamplingParams
from mla_router.worker.engine.sampling.penalties import TokenCounts
from mla_router.worker.engine.upload import Upload
from mla_router.worker.kernels.sampling.sample import sample
from mla_router.worker.kernels.sampling.top_threshold import top_threshold

# Most rows that are changed at a time, which limits temporary memory.
_SLICE_ROWS = 256


class Sampler:
    """Samples tokens, with the sampling state of all slots."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.features = SlotFeatures(num_slots)
        self._params = SlotSamplingParams(num_slots, device)
        self._counts = TokenCounts(num_slots, vocab_size, device)
        self._bias = LogitBias(num_slots, device)
        self._allowed = AllowedTokens(num_slots, vocab_size, device)
        self._upload = Upload(device)

    @property
    def penalty_bytes(self) -> int:
        """Bytes of device memory for the token counts of penalties."""
        return self._counts.nbytes

    def admit(self, requests: tuple[Admitted, ...]) -> None:
        """Writes the sampling state of requests that take a slot."""
        if not requests:
            return
        self.features.admit(requests)
        self._params.admit(requests)
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
        plan: StepPlan,
        masks: TokenMasks | None,
        *,
        lengths: Tensor,
        last_token: Tensor,
        out: Tensor,
    ) -> RowLogprobs | None:
        """Samples a token for each of the R sampled rows of `plan`, and returns their logprobs, if requested.

        `logits` [R, V] float32 are overwritten. `slots` [R] int64: slots of the rows. `lengths` [num_slots] int32: tokens
        of each slot, which the step increases by its token. Writes the tokens to `out` [R] int32 (NO_TOKEN for a row
        without a token) and, by slot, to `last_token` [num_slots] int64 (0 for such a row).
        """
        features = self.features.of(plan)
        penalized, biased, restricted, with_logprobs, masked, bits = self._upload(
            [
                features.penalized,
                features.biased,
                features.restricted,
                features.with_logprobs,
                np.array(masks.rows if masks else (), dtype=np.int64),
                masks.bits if masks else np.zeros((0, 0), dtype=np.int32),
            ]
        )
        for rows in _slices(restricted):
            _put(
                logits, rows, apply_token_bitmask(_get(logits, rows), self._allowed.of(slots[rows]))
            )
        for rows, some_bits in zip(_slices(masked), torch.split(bits, _SLICE_ROWS), strict=False):
            _put(logits, rows, apply_token_bitmask(_get(logits, rows), some_bits))
        # Logprobs are of the masked logits, before biases and penalties
        own = logits.index_select(0, with_logprobs) if len(with_logprobs) else None
        for rows in _slices(biased):
            of = slots[rows]
            _put(logits, rows, self._bias.add(_get(logits, rows), of, lengths[of]))
        for rows in _slices(penalized):
            params = self._params.of(slots[rows])
            _put(logits, rows, self._counts.penalize(_get(logits, rows), slots[rows], params))

        threshold = None
        if features.filtered:
            params = self._params.of(slots)
            threshold = top_threshold(
                logits,
                params.temperature,
                params.top_k,
                params.top_p,
                params.min_p,
            )
        temperature, seed = self._params.temperature, self._params.seed
        sample(logits, slots, lengths, temperature, seed, threshold, last_token, out)
        if len(penalized):
            owners = slots[penalized]
            self._counts.add(owners, last_token[owners])
        if own is None:
            return None
        runs = [
            Run(row, 1, top)
            for row, top in zip(
                features.with_logprobs.tolist(), features.num_top.tolist(), strict=True
            )
        ]
        return token_logprobs(own, last_token[slots[with_logprobs]], runs)


def _slices(rows: Tensor) -> Iterator[Tensor]:
    return iter(torch.split(rows, _SLICE_ROWS) if len(rows) else ())


# `rows` are distinct and ascending: if there are as many as logits, they are all rows in order, without a copy.


def _get(logits: Tensor, rows: Tensor) -> Tensor:
    return logits if len(rows) == len(logits) else logits.index_select(0, rows)


def _put(logits: Tensor, rows: Tensor, values: Tensor) -> None:
    if values is not logits:
        logits.index_copy_(0, rows, values)
