"""Merges the partial results of a request, one from each part of a `DecodeSchedule`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.attention.decode_schedule import DecodeSchedule
from mla_router.worker.kernels.attention.decode_tiling import MergeTiling, merge_tiling
from mla_router.worker.kernels.pdl import launch_options, reads_early, start_next, wait_for_previous


def partial_results(schedule: DecodeSchedule, out: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Returns memory for the partial results of pieces, [pieces, rows, V], and for their log-sum-exps to base 2,
    [pieces, rows], float32. `rows` are the query rows of a request, out [..., V].

    The index of a piece is its part plus its request. Both only grow from piece to piece, so indices are distinct.
    """
    pieces = schedule.num_parts + len(schedule.block_starts) - 1
    partial_out = out.new_empty((pieces, rows, out.shape[-1]), dtype=torch.float32)
    return partial_out, out.new_empty((pieces, rows), dtype=torch.float32)


class Parts(NamedTuple):
    """Partial results of a schedule (`partial_results`)."""

    out: Tensor
    lse: Tensor
    schedule: DecodeSchedule


def merge_parts(
    partial_out: Tensor,
    partial_lse: Tensor,
    schedule: DecodeSchedule,
    out: Tensor,
    *,
    shared: Parts | None = None,
    settled: bool = False,
    tiles: MergeTiling | None = None,
) -> None:
    """Writes the rows of requests with several parts to `out`, contiguous. `shared` are the results over common
    prefixes (`shared_prefixes.py`), which are merged with the results of each request. `settled`: the schedules are
    settled (`pdl.py`). `tiles` replaces `merge_tiling`, for benchmarks."""
    requests, (_, rows, width) = len(schedule.block_starts) - 1, partial_out.shape
    tiles = tiles or merge_tiling(requests * rows, width)
    row_blocks = triton.cdiv(rows, tiles.block_rows)
    merge_kernel[(requests * row_blocks, triton.cdiv(width, tiles.block_width))](
        partial_out,
        partial_lse,
        schedule.block_starts,
        schedule.part_size,
        out,
        shared and shared.out,
        shared and shared.lse,
        shared and shared.schedule.block_starts,
        shared and shared.schedule.part_size,
        len(shared.schedule.block_starts) - 1 if shared else 0,
        ROWS=rows,
        GROUP=shared.out.shape[1] // rows if shared else 1,
        WIDTH=width,
        BLOCK_WIDTH=tiles.block_width,
        BLOCK_PARTS=tiles.block_parts,
        BLOCK_ROWS=tiles.block_rows,
        SETTLED=settled,
        num_warps=tiles.num_warps,
        **launch_options(),
    )


@reads_early({"SETTLED": ("block_starts", "part_size", "shared_starts", "shared_size")})
@triton.jit(do_not_specialize=["num_groups"])
def merge_kernel(
    partial_out,
    partial_lse,
    block_starts,
    part_size,
    out,
    shared_out,
    shared_lse,
    shared_starts,
    shared_size,
    num_groups,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SETTLED: tl.constexpr,
):
    """Merges the partial results of BLOCK_ROWS rows, one after the other. After the last row of a request a program
    repeats it. Rows with a single part were written by the attention kernel."""
    start_next()
    if not SETTLED:
        wait_for_previous()
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    request = tl.program_id(0) // ROW_BLOCKS
    first_row = tl.program_id(0) % ROW_BLOCKS * BLOCK_ROWS
    columns = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    inside = columns < WIDTH if WIDTH % BLOCK_WIDTH else tl.full([BLOCK_WIDTH], True, tl.int1)
    first, parts = _parts_of(request, True, block_starts, part_size)
    shared_first, shared_parts = 0, 0
    if shared_out is not None:
        group = request // GROUP
        shared_first, shared_parts = _parts_of(
            group, group < num_groups, shared_starts, shared_size
        )
    wait_for_previous()
    if parts + shared_parts > 1:
        place = (first + request).to(tl.int64) * ROWS
        shared_place = (shared_first + request // GROUP).to(tl.int64) * GROUP + request % GROUP
        shared_place *= ROWS
        for index in range(BLOCK_ROWS):
            row = tl.minimum(first_row + index, ROWS - 1)
            maximum = -1e30
            total_weight = tl.zeros([BLOCK_PARTS], tl.float32)
            acc = tl.zeros([BLOCK_PARTS, BLOCK_WIDTH], tl.float32)
            acc, total_weight, maximum = _weigh(
                acc,
                total_weight,
                maximum,
                partial_out + (place + row) * WIDTH + columns[None, :],
                partial_lse + place + row,
                parts,
                inside,
                ROWS,
                WIDTH,
                BLOCK_PARTS,
            )
            if shared_out is not None:
                acc, total_weight, maximum = _weigh(
                    acc,
                    total_weight,
                    maximum,
                    shared_out + (shared_place + row) * WIDTH + columns[None, :],
                    shared_lse + shared_place + row,
                    shared_parts,
                    inside,
                    GROUP * ROWS,
                    WIDTH,
                    BLOCK_PARTS,
                )
            at = (request.to(tl.int64) * ROWS + row) * WIDTH + columns
            merged = tl.sum(acc, 0) / tl.sum(total_weight, 0)
            tl.store(out + at, merged.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _parts_of(request, exists, block_starts, part_size):
    """Returns the first part with blocks of a request, and the number of such parts."""
    size = tl.load(part_size)
    start = tl.load(block_starts + request, mask=exists, other=0)
    end = tl.load(block_starts + request + 1, mask=exists, other=0)
    first = start // size
    return first, tl.where(end > start, (end - 1) // size - first + 1, 0)


@triton.jit
def _weigh(
    acc,
    total_weight,
    maximum,
    values_at,
    lse_at,
    num_parts,
    inside,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Adds the results of several parts, which are ROWS rows apart."""
    for start in tl.range(0, num_parts, BLOCK_PARTS, num_stages=1):
        parts = start + tl.arange(0, BLOCK_PARTS)
        exists = parts < num_parts
        lse = tl.load(lse_at + parts * ROWS, mask=exists, other=float("-inf"))
        values = tl.load(
            values_at + parts[:, None] * (ROWS * WIDTH),
            mask=exists[:, None] & inside[None, :],
            other=0.0,
        )
        new = tl.maximum(maximum, tl.max(lse, 0))
        weights = tl.exp2(lse - new)
        shrink = tl.exp2(maximum - new)
        total_weight = total_weight * shrink + weights
        acc = acc * shrink + values * weights[:, None]
        maximum = new
    return acc, total_weight, maximum
