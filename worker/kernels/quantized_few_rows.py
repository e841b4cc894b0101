"""x @ weight.T with a quantized weight, for 2 to 16 rows that are not quantized: `few_rows.py`, with scales.

Weights become float16 in registers, where they are exact. Converting them to bfloat16 takes several times as long, so
each group of x is divided by a power of 2 to fit into float16: its largest magnitude is then between 1 and 2, and only
numbers below 2**-14 of it lose bits.

Each warp multiplies its own piece of the inputs, a block of columns with one scale, and adds the result times the scale
to its own sum. The sums are added at the end. A weight that fits into registers is loaded at once, before the wait for
the kernel that writes x (`pdl.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.pdl import launch_options, reads_early, wait_for_previous
from mla_router.worker.kernels.quantize import GROUP
from mla_router.worker.kernels.tuned import dense_tile
from mla_router.worker.kernels.weight import Weight
from mla_router.worker.kernels.weight_scales import as_float16

MAX_ROWS = 16
AT_ONCE_INPUTS = 3072  # at most, of a weight that fits into registers
DEPTH = GROUP  # inputs of a warp's piece


class Tiles(NamedTuple):
    outputs: int
    num_warps: int
    num_stages: int = 3  # 0: all weights at once


def is_few(rows: int, inputs: int) -> bool:
    """Whether the kernel is the fastest for rows [T, K] on an H200."""
    return rows <= 8 or (rows <= MAX_ROWS and inputs <= AT_ONCE_INPUTS)


def tiling(rows: int, outputs: int, inputs: int) -> Tiles:
    """Returns the fastest tiles of a sweep on an H200."""
    if inputs > AT_ONCE_INPUTS:
        return Tiles(16 if outputs < 4096 else 32, 8, 3)
    if outputs >= 4096:
        return Tiles(16, 4, 0)
    return Tiles(16 if rows <= 8 or inputs > 2048 else 32, 8, 0)


def tuned_tiles(rows: int, weight: Weight) -> Tiles | None:
    """Returns the tiles of a table (`tuned.py`), or None."""
    found = dense_tile(weight, rows, activations=16)
    if found is None:
        return None
    return Tiles(found.block_n, found.num_warps, found.num_stages)


def few_rows_quantized(
    x: Tensor, weight: Weight, *, out_dtype: torch.dtype, tiles: Tiles | None = None
) -> Tensor:
    """Returns x @ weight.T [T, N] for x [T, K], T <= MAX_ROWS, contiguous in the last axis. `tiles` replaces `tiling`,
    for benchmarks."""
    assert weight.scales is not None
    (rows, inputs), outputs = x.shape, len(weight.values)
    assert 0 < rows <= MAX_ROWS and x.stride(1) == 1 and weight.values.is_contiguous()
    tiles = tiles or tuned_tiles(rows, weight) or tiling(rows, outputs, inputs)
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    _few_rows_kernel[(triton.cdiv(outputs, tiles.outputs),)](
        x,
        weight.values,
        weight.scales,
        out,
        rows,
        x.stride(0),
        OUTPUTS=outputs,
        INPUTS=inputs,
        SCALE_ROWS=weight.block[0],
        SCALE_COLUMNS=weight.block[1],
        BLOCK_ROWS=max(triton.next_power_of_2(rows), 8),
        BLOCK_OUTPUTS=tiles.outputs,
        PIECES=tiles.num_warps,
        DEPTH=DEPTH,
        AT_ONCE=tiles.num_stages == 0,
        AHEAD=weight.constant and tiles.num_stages == 0,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages or 1,
        **launch_options(),
    )
    return out


@reads_early({"AHEAD": ("weight", "scales")})
@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x,
    weight,
    scales,
    out,
    rows,
    x_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    PIECES: tl.constexpr,
    DEPTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A step takes DEPTH inputs of each piece. Pieces are the first axis of tensors with three."""
    SCALES: tl.constexpr = (INPUTS + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    STEP: tl.constexpr = PIECES * DEPTH
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    row = tl.arange(0, BLOCK_ROWS)
    weight_at = weight + output.to(tl.int64)[None, :, None] * INPUTS
    scales_at = scales + (output // SCALE_ROWS * SCALES)[None, :]
    x_at = x + row.to(tl.int64)[None, :, None] * x_stride
    piece = tl.arange(0, PIECES) * DEPTH
    is_output = output < OUTPUTS
    acc = tl.zeros([PIECES, BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    if AT_ONCE:
        if not AHEAD:
            wait_for_previous()
        loaded = tl.tuple(())
        for start in tl.static_range(0, INPUTS, STEP):
            loaded += (_block(weight_at, start + piece, is_output, INPUTS, DEPTH),)
        if AHEAD:
            wait_for_previous()
        for start in tl.static_range(0, INPUTS, STEP):
            a = _block(x_at, start + piece, row < rows, INPUTS, DEPTH)
            scale = _scales(scales_at, start + piece, is_output, INPUTS, SCALE_COLUMNS)
            acc += _product(loaded[start // STEP], a, scale)
    else:
        wait_for_previous()
        for start in range(0, INPUTS, STEP):
            w = _block(weight_at, start + piece, is_output, INPUTS, DEPTH)
            a = _block(x_at, start + piece, row < rows, INPUTS, DEPTH)
            scale = _scales(scales_at, start + piece, is_output, INPUTS, SCALE_COLUMNS)
            acc += _product(w, a, scale)
    tl.store(
        out + row.to(tl.int64)[None, :] * OUTPUTS + output[:, None],
        tl.sum(acc, 0).to(out.dtype.element_ty),
        (row < rows)[None, :] & is_output[:, None],
    )


@triton.jit
def _product(w, a, scale):
    """Returns w [PIECES, outputs, DEPTH] times a [PIECES, rows, DEPTH], times scale [PIECES, outputs], in float32."""
    normal, power = as_float16(a.to(tl.float32))
    # Outputs are the first operand: a tensor core takes 16 rows of the first and 8 of the second
    part = tl.dot(w.to(tl.float16), tl.permute(normal, (0, 2, 1)))
    return part * (scale[:, :, None] * power[:, None, :])


@triton.jit
def _block(at, piece, exists, INPUTS: tl.constexpr, DEPTH: tl.constexpr):
    """Returns [PIECES, rows, DEPTH] of the rows at `at` [1, rows, 1]."""
    column = piece[:, None, None] + tl.arange(0, DEPTH)[None, None, :]
    return tl.load(at + column, exists[None, :, None] & (column < INPUTS), other=0.0)


@triton.jit
def _scales(at, piece, exists, INPUTS: tl.constexpr, SCALE_COLUMNS: tl.constexpr):
    """Returns the scales [PIECES, outputs] of the pieces."""
    inside = exists[None, :] & (piece < INPUTS)[:, None]
    return tl.load(at + (piece // SCALE_COLUMNS)[:, None], inside, other=0.0)
