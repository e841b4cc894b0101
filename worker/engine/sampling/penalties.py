"""Penalties for tokens that have occurred, and their counts.

The counts are on the device and updated there with every sampled token, so that the host can launch step N+1 before it
knows the tokens of step N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mla_router.worker.engine.sampling.params import RowSamplingParams
from mla_router.worker.engine.upload import Upload
from mla_router.worker.step.plan import Admitted

_IN_PROMPT, _ONE_OUTPUT = 1, 2


@dataclass(frozen=True, slots=True)
class DraftsAhead:
    """The drafts of P rows, and how often each of them counts: those between a row and the last token of its slot do."""

    tokens: Tensor  # [P, K] int64
    counts: Tensor  # [P, K] int32, as in the table: 0 for drafts that are not before the row

    @classmethod
    def of(cls, drafts: Tensor, offsets: Tensor) -> DraftsAhead:
        """Returns the first drafts of `drafts` [P, K] int64, as many as `offsets` [P] int32 says for each row."""
        ranks = torch.arange(drafts.shape[1], dtype=torch.int32, device=drafts.device)
        return cls.among(drafts, ranks < offsets[:, None])

    @classmethod
    def among(cls, drafts: Tensor, ahead: Tensor) -> DraftsAhead:
        """Returns those of `drafts` [P, K] int64 that are `ahead` [P, K] bool."""
        return cls(drafts, ahead.int() * _ONE_OUTPUT)


class TokenCounts:
    """A table [num_slots, V] int32: 1 if the token is in the slot's prompt, plus twice its occurrences in the output. Its
    4 * num_slots * V bytes (132 MB for 256 slots and V = 129,280) are allocated for the first request with a penalty."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._shape = num_slots, vocab_size
        self._device = device
        self._counts: Tensor | None = None
        self._upload = Upload(device)

    @property
    def nbytes(self) -> int:
        return 0 if self._counts is None else self._counts.nbytes

    def admit(self, requests: Sequence[Admitted]) -> None:
        """Counts the tokens of requests that take a slot."""
        vocab_size = self._shape[1]

        def indices(of: str) -> np.ndarray:
            parts = [
                np.asarray(getattr(r, of), dtype=np.int64) + r.slot * vocab_size for r in requests
            ]
            return np.concatenate(parts)

        slots, prompts, outputs = self._upload(
            [np.array([r.slot for r in requests]), indices("prompt"), indices("output")]
        )
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        self._counts.index_fill_(0, slots, 0)
        flat = self._counts.view(-1)
        flat.index_fill_(0, prompts, _IN_PROMPT)
        flat.scatter_add_(0, outputs, torch.full_like(outputs, _ONE_OUTPUT, dtype=torch.int32))

    def add(self, slots: Tensor, tokens: Tensor, ahead: DraftsAhead | None = None) -> None:
        """Counts the tokens that each slot has gained: `slots` and `tokens` [P] int64, without a slot twice. `ahead`: the
        drafts that were accepted before the tokens."""
        flat, first = self._existing.view(-1), slots * self._shape[1]
        indices = first + tokens
        flat.scatter_add_(0, indices, torch.full_like(indices, _ONE_OUTPUT, dtype=torch.int32))
        if ahead is not None:
            indices = first[:, None] + ahead.tokens
            flat.scatter_add_(0, indices.flatten(), ahead.counts.flatten())

    def penalize(
        self,
        logits: Tensor,
        slots: Tensor,
        params: RowSamplingParams,
        ahead: DraftsAhead | None = None,
    ) -> Tensor:
        """Applies the penalties of `slots` [P] to `logits` [P, V] in place, and returns them. `ahead`: the drafts of
        each row, which count as if they had been given.

        The repetition penalty comes first, for tokens of prompt or output: positive logits are divided by it, others are
        multiplied (CTRL, arXiv:1909.05858, as in transformers). OpenAI's frequency and presence penalties follow, for
        tokens of the output.
        """
        counts = self._existing.index_select(0, slots)
        if ahead is not None:
            counts.scatter_add_(1, ahead.tokens, ahead.counts)
        factor = params.repetition_penalty[:, None]
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(counts > 0, repeated, logits, out=logits)
        occurrences = counts >> 1
        logits -= params.frequency_penalty[:, None] * occurrences
        logits -= params.presence_penalty[:, None] * (occurrences > 0)
        return logits

    @property
    def _existing(self) -> Tensor:
        assert self._counts is not None, "no request with a penalty has been admitted"
        return self._counts
