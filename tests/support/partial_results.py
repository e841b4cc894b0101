"""Partial results of decode attention, and their merge in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_router.worker.kernels.attention.decode_schedule import DecodeSchedule
from mla_router.worker.kernels.attention.decode_tiling import Tiling
from mla_router.worker.kernels.attention.merge_parts import partial_results

TILING = Tiling(16, 16, num_warps=4, num_stages=2, programs_per_sm=1)


@dataclass(frozen=True)
class PartialResults:
    """Partial results of requests with so many `blocks`, in parts of `size`; entries without a request are NaN."""

    blocks: list[int]
    size: int
    out: Tensor  # [pieces, rows, V] float32
    lse: Tensor  # [pieces, rows] float32, to base 2

    @property
    def schedule(self) -> DecodeSchedule:
        starts = torch.tensor([0, *self.blocks]).cumsum(0).int()
        first = torch.zeros(-(-int(starts[-1]) // self.size), dtype=torch.int32)
        size = torch.tensor([self.size], dtype=torch.int32)
        on_device = (tensor.to(self.out.device) for tensor in (starts, first, size))
        return DecodeSchedule(*on_device, max_length=1, tiling=TILING)

    @property
    def pieces(self) -> list[list[int]]:
        """The pieces of each request: the piece of part p and request r is p + r."""
        found, start = [], 0
        for request, count in enumerate(self.blocks):
            parts = range(start // self.size, (start + count - 1) // self.size + 1)
            found.append([part + request for part in parts])
            start += count
        return found

    def merged(self) -> list[Tensor | None]:
        """The merged result of each request, [rows, V] float64; None for a request with a single part."""
        results: list[Tensor | None] = []
        for pieces in self.pieces:
            weights = (self.lse[pieces].double() * math.log(2)).softmax(0)
            whole = (weights[..., None] * self.out[pieces].double()).sum(0)
            results.append(whole if len(pieces) > 1 else None)
        return results


def random_results(
    blocks: list[int], size: int, *, rows: int, width: int, device: str
) -> PartialResults:
    """Draws partial results. One row of the very last piece has no weight."""
    empty = PartialResults(blocks, size, torch.empty(0, device=device), torch.empty(0))
    out, lse = partial_results(empty.schedule, torch.empty(1, width, device=device), rows)
    out.fill_(float("nan"))
    lse.fill_(float("nan"))
    draw = torch.Generator(device).manual_seed(width)
    used = [piece for pieces in empty.pieces for piece in pieces]
    out[used] = torch.randn(len(used), rows, width, generator=draw, device=device)
    lse[used] = 9 * torch.randn(len(used), rows, generator=draw, device=device)
    lse[used[-1], 0] = float("-inf")
    return PartialResults(blocks, size, out, lse)
