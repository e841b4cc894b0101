"""The part of attention that is among the nodes of a tree of drafts, whose keys lie after the pages of the requests."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mla_router.worker.kernels.attention.decode_schedule import DecodeSchedule
from mla_router.worker.kernels.attention.decode_tiling import Tiling


class TreeTail(NamedTuple):
    """B query rows, equally many of each slot. The keys of slot i are `keys` rows from `first_row` + i * `keys` of the
    flat cache on."""

    visible: Tensor  # [B] int64: bit j: the row attends to key j of its slot
    queries: int  # rows of a slot
    keys: int  # at most 64
    first_row: int
    schedule: DecodeSchedule | None = None  # `one_part_each`, on a GPU

    def sees(self) -> Tensor:
        """Returns whether each row attends to each key of its slot, [B, keys] bool."""
        bits = torch.arange(self.keys, device=self.visible.device)
        return (self.visible[:, None] >> bits) & 1 != 0

    def locations(self) -> Tensor:
        """Returns the flat cache rows of the keys of each row's slot, [B, keys] int64."""
        rows = torch.arange(len(self.visible), device=self.visible.device)
        keys = torch.arange(self.keys, device=self.visible.device)
        return self.first_row + (rows // self.queries * self.keys)[:, None] + keys


def one_part_each(requests: int, tiling: Tiling, device: torch.device) -> DecodeSchedule:
    """Returns the schedule of requests that have one block of keys each, the nodes of their trees, as one part."""
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
    size = torch.ones(1, dtype=torch.int32, device=device)
    return DecodeSchedule(starts, starts[:-1], size, 1, tiling)
