"""Requests that are restricted to some tokens (`SamplingParams.allowed`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mla_router.worker.engine.upload import Upload
from mla_router.worker.step.plan import Admitted


class AllowedTokens:
    """A token bitmask for each slot, in the layout of `TokenMasks`.

    The table [num_slots, ceil(vocab / 32)] int32 is allocated for the first restricted request: 16 KB a slot for a
    vocabulary of 128,000.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._shape = num_slots, -(-vocab_size // 32)
        self._bits = torch.empty(0, self._shape[1], dtype=torch.int32, device=device)
        self._upload = Upload(device)

    def admit(self, requests: Sequence[Admitted]) -> None:
        """Writes the bitmasks of restricted requests that take a slot."""
        if not len(self._bits):
            self._bits = self._bits.new_zeros(self._shape)
        rows = np.zeros((len(requests), self._shape[1]), dtype=np.int32)
        for row, request in zip(rows.view(np.uint8), requests, strict=True):
            allowed = np.frombuffer(request.sampling.allowed, dtype=np.uint8)
            row[: len(allowed)] = allowed
        slots, bits = self._upload([np.array([r.slot for r in requests]), rows])
        self._bits.index_copy_(0, slots, bits)

    def of(self, slots: Tensor) -> Tensor:
        """Returns the bitmasks of `slots` [R] int64, for `apply_token_bitmask`."""
        return self._bits.index_select(0, slots)
