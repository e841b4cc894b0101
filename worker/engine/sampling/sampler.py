"""One token for every sampled row of a step, and its scores, without waiting for the device.

What is done to a row's logits, in this order (transformers' and vLLM's): logit_bias and the ban of stop
tokens until min_tokens; repetition, then frequency and presence penalty; the grammar's mask; temperature;
top_k, top_p and min_p. Greedy rows skip the last four. The first three run over the rows that want them
and over no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mla_router.worker.core import Admitted, StepPlan, TokenMasks
from mla_router.worker.engine.sampling.bias import LogitBias
from mla_router.worker.engine.sampling.groups import SlotWants
from mla_router.worker.engine.sampling.masks import forbid
from mla_router.worker.engine.sampling.penalties import TokenCounts
from mla_router.worker.engine.sampling.scores import RowScores, Run, score
from mla_router.worker.engine.sampling.settings import SlotSettings
from mla_router.worker.engine.upload import Upload
from mla_router.worker.kernels.sampling.sample import sample
from mla_router.worker.kernels.sampling.top_threshold import top_threshold

# Rows whose logits are changed at a time: it bounds the temporaries.
_SLICE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens: Tensor  # [R] int64, NO_TOKEN where there was none to draw
    scores: RowScores | None


class Sampler:
    """The sampling state of all slots, and its use."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.wants = SlotWants(num_slots)
        self._settings = SlotSettings(num_slots, device)
        self._counts = TokenCounts(num_slots, vocab_size, device)
        self._bias = LogitBias(num_slots, device)
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

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        plan: StepPlan,
        masks: TokenMasks | None,
    ) -> Sampled:
        """`logits` [R, V] float32 of the plan's sampled rows are written over; `slots` and
        `positions` [R] int64 are theirs, the latter of the tokens about to be sampled."""
        groups = self.wants.groups(plan)
        penalized, biased, scored, masked, bits = self._upload(
            [
                groups.penalized,
                groups.biased,
                groups.scored,
                np.array(masks.rows if masks else (), dtype=np.int64),
                masks.bits if masks else np.zeros((0, 0), dtype=np.int32),
            ]
        )
        own = logits.index_select(0, scored) if len(scored) else None  # as the model has made them
        for rows in _slices(biased):
            _put(logits, rows, self._bias.add(_get(logits, rows), slots[rows], positions[rows]))
        for rows in _slices(penalized):
            own_settings = self._settings.of(slots[rows])
            _put(logits, rows, self._counts.penalize(_get(logits, rows), slots[rows], own_settings))
        for rows, some_bits in zip(_slices(masked), torch.split(bits, _SLICE_ROWS), strict=False):
            _put(logits, rows, forbid(_get(logits, rows), some_bits))

        settings = self._settings.of(slots)
        threshold = None
        if groups.filtered:
            threshold = top_threshold(
                logits, settings.temperature, settings.top_k, settings.top_p, settings.min_p
            )
        tokens = sample(logits, settings.temperature, settings.seed, positions, threshold)
        if len(penalized):
            self._counts.add(slots[penalized], tokens[penalized].clamp_min_(0))
        scores = None
        if own is not None:
            runs = [
                Run(row, 1, top)
                for row, top in zip(groups.scored.tolist(), groups.num_top.tolist(), strict=True)
            ]
            scores = score(own, tokens[scored].clamp_min_(0), runs)
        return Sampled(tokens, scores)


def _slices(rows: Tensor) -> Iterator[Tensor]:
    return iter(torch.split(rows, _SLICE_ROWS) if len(rows) else ())


# Rows are distinct and ascending: as many as there are means all of them, as they lie.


def _get(logits: Tensor, rows: Tensor) -> Tensor:
    return logits if len(rows) == len(logits) else logits.index_select(0, rows)


def _put(logits: Tensor, rows: Tensor, values: Tensor) -> None:
    if values is not logits:
        logits.index_copy_(0, rows, values)
