"""Penalties on tokens that have occurred, and the count of what has.

The counts live on the device and grow there with every sampled token, so that step N+1 can be
launched before the host knows what step N sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mla_router.worker.core import Admitted
from mla_router.worker.engine.sampling.settings import RowSettings
from mla_router.worker.engine.upload import Upload

_IN_PROMPT, _ONE_OUTPUT = 1, 2


class TokenCounts:
    """[num_slots, V] int32: 1 if the token is in the slot's prompt, plus twice its occurrences in
    the output. 4 * num_slots * V bytes (132 MB for 256 slots and V = 129,280), taken when the first
    request with a penalty comes."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._shape = num_slots, vocab_size
        self._device = device
        self._counts: Tensor | None = None
        self._upload = Upload(device)

    @property
    def num_bytes_taken(self) -> int:
        return 0 if self._counts is None else self._counts.nbytes

    def admit(self, requests: Sequence[Admitted]) -> None:
        """Count the tokens of requests that take a slot."""
        vocab_size = self._shape[1]

        def places(of: str) -> np.ndarray:
            parts = [
                np.asarray(getattr(r, of), dtype=np.int64) + r.slot * vocab_size for r in requests
            ]
            return np.concatenate(parts)

        slots, prompts, outputs = self._upload(
            [np.array([r.slot for r in requests]), places("prompt"), places("output")]
        )
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        self._counts.index_fill_(0, slots, 0)
        flat = self._counts.view(-1)
        flat.index_fill_(0, prompts, _IN_PROMPT)
        flat.scatter_add_(0, outputs, torch.full_like(outputs, _ONE_OUTPUT, dtype=torch.int32))

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Count one sampled token for each of `slots`, [P] int64 both; no slot is there twice."""
        counts = self._existing
        places = slots * self._shape[1] + tokens
        counts.view(-1).scatter_add_(
            0, places, torch.full_like(places, _ONE_OUTPUT, dtype=torch.int32)
        )

    def penalize(self, logits: Tensor, slots: Tensor, settings: RowSettings) -> Tensor:
        """`logits` [P, V] of `slots` with their penalties, written over.

        First the repetition penalty, on tokens of prompt or output, as transformers has it (CTRL,
        arXiv:1909.05858: logits that are positive are divided by it, others multiplied). Then
        OpenAI's two, on tokens of the output.
        """
        counts = self._existing.index_select(0, slots)
        factor = settings.repetition_penalty[:, None]
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(counts > 0, repeated, logits, out=logits)
        occurrences = counts >> 1
        logits -= settings.frequency_penalty[:, None] * occurrences
        logits -= settings.presence_penalty[:, None] * (occurrences > 0)
        return logits

    @property
    def _existing(self) -> Tensor:
        assert self._counts is not None, "no request with a penalty has been admitted"
        return self._counts
