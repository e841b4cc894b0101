"""The product of one row and a quantized weight, also behind a norm.

Weights become float32 in registers, and the row is not quantized: that is exact, and costs less time than the weights
take to arrive. A tile is [outputs, blocks of columns with one scale, columns of a block].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.pdl import launch_options, reads_early, wait_for_previous
from mla_router.worker.kernels.weight import Weight

PIECE = 128  # columns of a tile's block


def tiling(outputs: int, inputs: int) -> tuple[int, int, int]:
    """Returns outputs and blocks of columns of a program's step, and warps: the fastest of a sweep on an H200, or within
    5% of it."""
    if inputs > 8192:
        return 4, 16, 4
    return (4, 8, 8) if outputs <= 3072 else (8, 4, 4)


def quantized_gemv_triton(
    x: Tensor,
    weight: Weight,
    *,
    out_dtype: torch.dtype,
    tiles: tuple[int, int, int] | None = None,
) -> Tensor:
    """Returns x @ weight.T [1, N] for x [1, K]. `tiles` replaces `tiling`, for benchmarks."""
    assert weight.scales is not None
    outputs, inputs = weight.values.shape
    assert x.shape == (1, inputs) and x.is_contiguous() and weight.values.is_contiguous()
    block_outputs, pieces, num_warps = tiles or tiling(outputs, inputs)
    out = torch.empty(1, outputs, dtype=out_dtype, device=x.device)
    _quantized_gemv_kernel[(triton.cdiv(outputs, block_outputs),)](
        x,
        weight.values,
        weight.scales,
        out,
        OUTPUTS=outputs,
        INPUTS=inputs,
        SCALE_ROWS=weight.block[0],
        SCALE_COLUMNS=weight.block[1],
        BLOCK_OUTPUTS=block_outputs,
        PIECES=pieces,
        PIECE=PIECE,
        AHEAD=weight.constant,
        num_warps=num_warps,
        **launch_options(),
    )
    return out


@reads_early({"AHEAD": ("weight", "scales")})
@triton.jit
def _quantized_gemv_kernel(
    x,
    weight,
    scales,
    out,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    SCALES: tl.constexpr = (INPUTS + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    STEP: tl.constexpr = PIECES * PIECE
    output = tl.minimum(tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS), OUTPUTS - 1)
    weight_at = weight + output.to(tl.int64)[:, None, None] * INPUTS
    scales_at = scales + (output // SCALE_ROWS * SCALES)[:, None]
    acc = tl.zeros([BLOCK_OUTPUTS, PIECES, PIECE], tl.float32)
    if not AHEAD:
        wait_for_previous()
    w, scale = scaled_weights(weight_at, scales_at, 0, INPUTS, SCALE_COLUMNS, PIECES, PIECE)
    if AHEAD:
        wait_for_previous()
    for start in tl.static_range(0, INPUTS, STEP):
        column = start + tl.arange(0, PIECES)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
        a = tl.load(x + column, column < INPUTS, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * (a[None, :, :] * scale[:, :, None])
        if start + STEP < INPUTS:
            w, scale = scaled_weights(
                weight_at, scales_at, start + STEP, INPUTS, SCALE_COLUMNS, PIECES, PIECE
            )
    result = tl.sum(tl.sum(acc, 2), 1)
    tl.store(out + output, result.to(out.dtype.element_ty))


@triton.jit
def scaled_weights(
    weight_at,
    scales_at,
    start,
    INPUTS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Loads values [outputs, PIECES, PIECE] from column `start` on, which leave L2 first, and scales [outputs, PIECES]."""
    piece = start + tl.arange(0, PIECES) * PIECE
    column = piece[:, None] + tl.arange(0, PIECE)[None, :]
    w = tl.load(
        weight_at + column[None, :, :],
        (column < INPUTS)[None, :, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    scale = tl.load(
        scales_at + (piece // SCALE_COLUMNS)[None, :], (piece < INPUTS)[None, :], other=0.0
    )
    return w, scale
