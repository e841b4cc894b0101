"""What a recording of steps with prompts reads of its rows."""

from __future__ import annotations

import torch
from torch import Tensor


class PaddedRows:
    """Tokens, slots and positions of `size` rows. Those that a step does not have are the idle slot's, at
    position 0: in page 0 of the cache, which is nobody's."""

    def __init__(self, size: int, idle_slot: int, device: torch.device) -> None:
        self.size = size
        self._idle_slot = idle_slot
        self._rows = torch.zeros(3, size, dtype=torch.int64, device=device)
        self._rows[1] = idle_slot

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, slots and positions [size] int64, which `write` writes over."""
        tokens, slots, positions = self._rows.unbind()
        return tokens, slots, positions

    def write(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Those of a step: all [T] int64, T at most `size`."""
        rows = len(tokens)
        self._rows[0, :rows] = tokens
        self._rows[1, :rows] = slots
        self._rows[2, :rows] = positions
        if rows < self.size:
            self._rows[1, rows:] = self._idle_slot
            self._rows[2, rows:] = 0
