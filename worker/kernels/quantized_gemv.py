"""The product of one row and a quantized weight, alone and with the norm before it.

Weights become float32 in registers, and the row is not quantized: that is exact, and costs less time than the weights
take to arrive. A tile is [outputs, blocks of columns with one scale, columns of a block].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.pdl import launch_options, reads_early, wait_for_previous
from mla_router.worker.kernels.quantize import GROUP
from mla_router.worker.kernels.rms_norm import scaled
from mla_router.worker.kernels.weight import Weight

PIECE = GROUP  # columns of a tile's block
# All programs read the row: with more inputs the norm is a kernel of its own
MAX_NORM_INPUTS = 4096
NORM_OUTPUTS = 4  # of a program


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


def norm_gemv_triton(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    *,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Returns rms_norm(x + residual) @ weight.T [1, N] and x + residual [1, K], as `norm_linear`. Each program computes
    the norm for itself while its weights arrive, so K is at most MAX_NORM_INPUTS."""
    assert weight.scales is not None
    outputs, inputs = weight.values.shape
    other = x if residual is None else residual
    assert x.shape == other.shape == (1, inputs) and inputs <= MAX_NORM_INPUTS
    assert x.stride(1) == other.stride(1) == 1 and weight.values.is_contiguous()
    product = torch.empty(1, outputs, dtype=out_dtype, device=x.device)
    total = x if residual is None else x.new_empty(1, inputs)
    _norm_gemv_kernel[(triton.cdiv(outputs, NORM_OUTPUTS),)](
        x,
        other,
        norm_weight,
        weight.values,
        weight.scales,
        product,
        total,
        eps,
        OUTPUTS=outputs,
        INPUTS=inputs,
        SCALE_ROWS=weight.block[0],
        SCALE_COLUMNS=weight.block[1],
        BLOCK_OUTPUTS=NORM_OUTPUTS,
        PIECES=triton.next_power_of_2(triton.cdiv(inputs, PIECE)),
        PIECE=PIECE,
        ADD=residual is not None,
        AHEAD=weight.constant,
        num_warps=4,
        **launch_options(),
    )
    return product, total


@reads_early({"AHEAD": ("weight", "scales", "norm_weight")})
@triton.jit
def _norm_gemv_kernel(
    x,
    residual,
    norm_weight,
    weight,
    scales,
    product,
    total,
    eps,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    ADD: tl.constexpr,
    AHEAD: tl.constexpr,
):
    SCALES: tl.constexpr = (INPUTS + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    block = tl.program_id(0)
    output = tl.minimum(block * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS), OUTPUTS - 1)
    weight_at = weight + output.to(tl.int64)[:, None, None] * INPUTS
    scales_at = scales + (output // SCALE_ROWS * SCALES)[:, None]
    column = tl.arange(0, PIECES)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    inside = column < INPUTS
    if not AHEAD:
        wait_for_previous()
    w, scale = scaled_weights(weight_at, scales_at, 0, INPUTS, SCALE_COLUMNS, PIECES, PIECE)
    norm_scale = tl.load(norm_weight + column, inside, other=0.0)
    if AHEAD:
        wait_for_previous()
    values = tl.load(x + column, inside, other=0.0)
    if ADD:
        more = tl.load(residual + column, inside, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(total + column, values, inside & (block == 0))
    wide = values.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / INPUTS + eps)
    a = scaled(values, inverse_rms, norm_scale).to(tl.float32)
    result = tl.sum(tl.sum(w.to(tl.float32) * (a[None, :, :] * scale[:, :, None]), 2), 1)
    tl.store(product + output, result.to(product.dtype.element_ty))


@triton.jit
def scaled_weights(
    weight_at,
    scales_at,
    start,
    INPUTS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    exists=True,
):
    """Loads values [outputs, PIECES, PIECE] from column `start` on, which leave L2 first, and scales [outputs, PIECES].
    Returns zeros unless they exist."""
    piece = start + tl.arange(0, PIECES) * PIECE
    column = piece[:, None] + tl.arange(0, PIECE)[None, :]
    w = tl.load(
        weight_at + column[None, :, :],
        (column < INPUTS)[None, :, :] & exists,
        other=0.0,
        eviction_policy="evict_first",
    )
    scale = tl.load(
        scales_at + (piece // SCALE_COLUMNS)[None, :], (piece < INPUTS)[None, :] & exists, other=0.0
    )
    return w, scale
