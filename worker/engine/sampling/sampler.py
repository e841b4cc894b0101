"""One token for every sampled row of a step, and its scores, without waiting for the device.

What is done to a row's logits, in this order (transformers' and vLLM's): logit_bias and the ban of stop
tokens until min_tokens; repetition, then frequency and presence penalty; the grammar's mask; temperature;
top_k, top_p and min_p. Greedy rows skip the last four. Each step runs over the rows that want it and over
no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mla_router.worker.core import NO_TOKEN, Admitted, StepPlan, TokenMasks
from mla_router.worker.engine.sampling.bias import LogitBias
from mla_router.worker.engine.sampling.draw import Top, draw
from mla_router.worker.engine.sampling.groups import Groups, SlotWants
from mla_router.worker.engine.sampling.masks import forbid
from mla_router.worker.engine.sampling.penalties import TokenCounts
from mla_router.worker.engine.sampling.scores import RowScores, Run, score
from mla_router.worker.engine.sampling.settings import SlotSettings
from mla_router.worker.engine.upload import Upload

# Rows that are worked on at a time: it bounds the temporaries, which are some 50 bytes a logit.
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
        penalized, biased, plain, shortlisted, ordered, scored, masked, bits = self._upload(
            [
                groups.penalized,
                groups.biased,
                groups.plain,
                groups.shortlisted,
                groups.sorted,
                groups.scored,
                np.array(masks.rows if masks else (), dtype=np.int64),
                masks.bits if masks else np.zeros((0, 0), dtype=np.int32),
            ]
        )
        own = logits.index_select(0, scored) if len(scored) else None  # as the model has made them
        for rows in _slices(biased):
            _put(logits, rows, self._bias.add(_get(logits, rows), slots[rows], positions[rows]))
        for rows in _slices(penalized):
            settings = self._settings.of(slots[rows])
            _put(logits, rows, self._counts.penalize(_get(logits, rows), slots[rows], settings))
        for rows, some_bits in zip(_slices(masked), torch.split(bits, _SLICE_ROWS), strict=False):
            _put(logits, rows, forbid(_get(logits, rows), some_bits))

        drawn = ((plain, Top.ALL), (shortlisted, Top.SHORTLIST), (ordered, Top.SORTED))
        best, tokens = self._choose(logits, slots, positions, groups, drawn)
        valid = best.isfinite()
        safe = torch.where(valid, tokens, 0)
        if len(penalized):
            self._counts.add(slots[penalized], safe[penalized])
        scores = None
        if own is not None:
            runs = [
                Run(row, 1, top)
                for row, top in zip(groups.scored.tolist(), groups.num_top.tolist(), strict=True)
            ]
            scores = score(own, safe[scored], runs)
        return Sampled(torch.where(valid, tokens, NO_TOKEN), scores)

    def _choose(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        groups: Groups,
        drawn: Iterable[tuple[Tensor, Top]],
    ) -> tuple[Tensor, Tensor]:
        """The token of each row and the value that was the row's largest: not finite if the row has
        a logit that is no number or infinite, or none that is allowed."""
        if groups.num_greedy:
            best, tokens = logits.max(dim=-1)
        else:
            best = torch.empty_like(slots, dtype=logits.dtype)
            tokens = torch.empty_like(slots)
        for group, top in drawn:
            for rows in _slices(group):
                settings = self._settings.of(slots[rows])
                score, token = draw(
                    _get(logits, rows), settings, positions[rows], top=top, min_p=groups.min_p
                )
                best[rows], tokens[rows] = score, token
        return best, tokens


def _slices(rows: Tensor) -> Iterator[Tensor]:
    return iter(torch.split(rows, _SLICE_ROWS) if len(rows) else ())


# Rows are distinct and ascending: as many as there are means all of them, as they lie.


def _get(logits: Tensor, rows: Tensor) -> Tensor:
    return logits if len(rows) == len(logits) else logits.index_select(0, rows)


def _put(logits: Tensor, rows: Tensor, values: Tensor) -> None:
    if values is not logits:
        logits.index_copy_(0, rows, values)
