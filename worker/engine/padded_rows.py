"""What a recording of steps with prompts reads of its rows."""

from __future__ import annotations

import torch
from torch import Tensor


class PaddedRows:
    """Tokens, slots and positions of `size` rows. Those that a step does not have are the idle slot's, at
    position 0: in page 0 of the cache, which is nobody's."""

    def __init__(self, size: int, idle_slot: int, device: torch.device) -> None:
        self.size = size
        self._idle = torch.tensor([[0], [idle_slot], [0]], device=device)
        self._rows = self._idle.repeat(1, size)

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, slots and positions [size] int64, which `write` writes over."""
        tokens, slots, positions = self._rows.unbind()
        return tokens, slots, positions

    def write(self, rows: Tensor) -> None:
        """Those of a step: [3, T] int64, T at most `size`."""
        given = rows.shape[1]
        self._rows[:, :given] = rows
        if given < self.size:
            self._rows[:, given:] = self._idle
