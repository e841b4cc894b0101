"""What several parts of a `DecodeSchedule` computed of one request, merged into its result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.attention.decode_schedule import DecodeSchedule
from mla_router.worker.kernels.attention.decode_tiling import MergeTiling, merge_tiling
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous


def partial_results(schedule: DecodeSchedule, out: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Memory for what parts compute of requests that they do not have whole: [pieces, rows, V] and the
    log-sum-exps to base 2 [pieces, rows], float32. `rows` are the query rows of a request, out [..., V].

    The piece of part p and request r is p + r: both only grow from piece to piece, so that each has a
    place of its own.
    """
    pieces = schedule.num_parts + len(schedule.block_starts) - 1
    partial_out = out.new_empty((pieces, rows, out.shape[-1]), dtype=torch.float32)
    return partial_out, out.new_empty((pieces, rows), dtype=torch.float32)


def merge_parts(
    partial_out: Tensor,
    partial_lse: Tensor,
    schedule: DecodeSchedule,
    out: Tensor,
    *,
    settled: bool = False,
    tiles: MergeTiling | None = None,
) -> None:
    """Writes into `out`, contiguous, the rows of the requests that lie in several parts. `settled`: the
    schedule is (`pdl.py`). `tiles` is for measuring others than `merge_tiling`'s."""
    requests, (_, rows, width) = len(schedule.block_starts) - 1, partial_out.shape
    tiles = tiles or merge_tiling(requests * rows, width)
    merge_kernel[(requests * rows, triton.cdiv(width, tiles.block_width))](
        partial_out,
        partial_lse,
        schedule.block_starts,
        schedule.part_size,
        out,
        ROWS=rows,
        WIDTH=width,
        BLOCK_WIDTH=tiles.block_width,
        BLOCK_PARTS=tiles.block_parts,
        STAGES=tiles.num_stages,
        SETTLED=settled,
        num_warps=tiles.num_warps,
        **launch_options(),
    )


@triton.jit
def merge_kernel(
    partial_out,
    partial_lse,
    block_starts,
    part_size,
    out,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    SETTLED: tl.constexpr,
):
    """Weighs together what several parts computed of one row; a row that one part computed whole is
    already in place.

    With several STAGES blocks of parts are copied to shared memory, all under way at once. With one they
    are loaded to registers, where the assembler puts most loads next to their uses: one after another.
    """
    if not SETTLED:
        wait_for_previous()
    request = tl.program_id(0) // ROWS
    row = tl.program_id(0) % ROWS
    columns = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    inside = columns < WIDTH if WIDTH % BLOCK_WIDTH else tl.full([BLOCK_WIDTH], True, tl.int1)
    size = tl.load(part_size)
    first = tl.load(block_starts + request) // size
    last = (tl.load(block_starts + request + 1) - 1) // size
    wait_for_previous()
    if first < last:
        place = (first + request).to(tl.int64) * ROWS + row
        values_at = partial_out + place * WIDTH + columns[None, :]
        lse_at = partial_lse + place
        maximum = -1e30
        total_weight = tl.zeros([BLOCK_PARTS], tl.float32)
        acc = tl.zeros([BLOCK_PARTS, BLOCK_WIDTH], tl.float32)
        for start in tl.range(0, last - first + 1, BLOCK_PARTS, num_stages=STAGES):
            parts = start + tl.arange(0, BLOCK_PARTS)
            exists = parts <= last - first
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
        at = (request.to(tl.int64) * ROWS + row) * WIDTH + columns
        merged = tl.sum(acc, 0) / tl.sum(total_weight, 0)
        tl.store(out + at, merged.to(out.dtype.element_ty), mask=inside)
