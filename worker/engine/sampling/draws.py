"""Draws of rows that are no slots: of drafts, and of the tokens that verify them.

A row draws what its slot would draw at the row's position, since a draw depends on logits, seed and position alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.engine.sampling.params import SlotSamplingParams
from mla_router.worker.kernels.sampling.sample import sample
from mla_router.worker.kernels.sampling.top_scores import top_scores


class Draws:
    """The state of R rows of `slots` [R] int64, at `positions` [R] int32 of their next tokens."""

    def __init__(self, params: SlotSamplingParams, slots: Tensor, positions: Tensor) -> None:
        self._rows = torch.arange(len(slots), device=slots.device)
        self._positions = positions
        self._temperature = params.temperature.index_select(0, slots)
        self._seed = params.seed.index_select(0, slots)
        self.tokens = torch.empty_like(slots)  # [R] int64, the last draw, 0 for NO_TOKEN
        self.drawn = torch.empty_like(positions)  # [R] int32, the same with NO_TOKEN

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns the `count` best tokens of each row by `logits` [R, V], the one that `draw` takes first, [R, count]
        int64, and the logarithms of their shares (`top_scores`). Moves to the next positions."""
        found = top_scores(logits, self._positions, self._temperature, self._seed, count)
        self._positions = self._positions + 1
        return found

    def draw(self, logits: Tensor, threshold: Tensor | None = None) -> None:
        """Draws from `logits` [R, V], with `threshold` as in `sample`, and moves to the next positions."""
        sample(
            logits,
            self._rows,
            self._positions,
            self._temperature,
            self._seed,
            threshold,
            self.tokens,
            self.drawn,
        )
