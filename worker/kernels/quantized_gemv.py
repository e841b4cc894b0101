"""The product of one row and a quantized weight, alone and with the norm before it.

Weights become float32 in registers, and the row is not quantized: that is exact, and costs less time than the weights
take to arrive. A tile is [pieces, outputs, PIECE]: columns of a piece have one scale, which multiplies sums of RUN
neighbours. A thread reads them at once, and has the same columns of all its outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.pdl import launch_options, reads_early, start_next, wait_for_previous
from mla_router.worker.kernels.quantize import GROUP
from mla_router.worker.kernels.rms_norm import scaled
from mla_router.worker.kernels.weight import Weight

PIECE = GROUP  # columns with one scale
RUN = 8  # neighbours of a thread: 16 bytes of the row
# All programs read the row: with more inputs the norm is a kernel of its own
MAX_NORM_INPUTS = 4096
NORM_OUTPUTS = 4  # of a program
STAGES = 2  # steps whose weights are under way at once


def tiling(outputs: int, inputs: int) -> tuple[int, int, int]:
    """Returns outputs and pieces of a program's step, and warps: within 11% of the fastest of a sweep on an H100, over
    the shapes of V2-Lite and V3."""
    return (4, 4, 2) if outputs > 8192 >= inputs else (2, 8, 4)


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
        STAGES=STAGES,
        PIECE=PIECE,
        RUN=RUN,
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
    STAGES: tl.constexpr,
    PIECE: tl.constexpr,
    RUN: tl.constexpr,
    AHEAD: tl.constexpr,
):
    start_next()
    SCALES: tl.constexpr = (INPUTS + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    STEPS: tl.constexpr = (INPUTS + PIECES * PIECE - 1) // (PIECES * PIECE)
    output = tl.minimum(tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS), OUTPUTS - 1)
    weight_at = weight + output.to(tl.int64) * INPUTS
    scales_at = scales + output // SCALE_ROWS * SCALES
    acc = tl.zeros([PIECES, BLOCK_OUTPUTS, PIECE // RUN], tl.float32)
    if not AHEAD:
        wait_for_previous()
    tiles = tl.tuple(())
    for step in tl.static_range(STEPS + STAGES):
        if AHEAD and step == STAGES:
            wait_for_previous()
        if step < STEPS:
            tiles += scaled_weights(
                weight_at, scales_at, step, INPUTS, SCALE_COLUMNS, PIECES, PIECE, RUN
            )
        if step >= STAGES:
            column = columns(step - STAGES, PIECES, PIECE, RUN)
            a = tl.load(x + column, column < INPUTS, other=0.0).to(tl.float32)
            acc += scaled_sums(tiles[2 * (step - STAGES)], tiles[2 * (step - STAGES) + 1], a, RUN)
    result = tl.sum(tl.sum(acc, 2), 0)
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
        RUN=RUN,
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
    RUN: tl.constexpr,
    ADD: tl.constexpr,
    AHEAD: tl.constexpr,
):
    start_next()
    SCALES: tl.constexpr = (INPUTS + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    block = tl.program_id(0)
    output = tl.minimum(block * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS), OUTPUTS - 1)
    weight_at = weight + output.to(tl.int64) * INPUTS
    scales_at = scales + output // SCALE_ROWS * SCALES
    column = columns(0, PIECES, PIECE, RUN)
    inside = column < INPUTS
    if not AHEAD:
        wait_for_previous()
    w, scale = scaled_weights(weight_at, scales_at, 0, INPUTS, SCALE_COLUMNS, PIECES, PIECE, RUN)
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
    result = tl.sum(tl.sum(scaled_sums(w, scale, a, RUN), 2), 0)
    tl.store(product + output, result.to(product.dtype.element_ty))


@triton.jit
def columns(step, PIECES: tl.constexpr, PIECE: tl.constexpr, RUN: tl.constexpr):
    """Returns the columns [PIECES, PIECE] of a step."""
    piece = step * PIECES + tl.arange(0, PIECES)
    return (piece * PIECE)[:, None] + tl.max_contiguous(tl.arange(0, PIECE), RUN)[None, :]


@triton.jit
def scaled_weights(
    weight_at,
    scales_at,
    step,
    INPUTS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    RUN: tl.constexpr,
    exists=True,
):
    """Loads values [PIECES, outputs, PIECE] of a step, which leave L2 first, and scales [PIECES, outputs]. `weight_at`
    and `scales_at`: the first ones of each output. Returns zeros unless they exist."""
    column = columns(step, PIECES, PIECE, RUN)
    w = tl.load(
        weight_at[None, :, None] + column[:, None, :],
        (column < INPUTS)[:, None, :] & exists,
        other=0.0,
        eviction_policy="evict_first",
    )
    first = ((step * PIECES + tl.arange(0, PIECES)) * PIECE)[:, None]
    at = scales_at[None, :] + first // SCALE_COLUMNS
    return w, tl.load(at, (first < INPUTS) & exists, other=0.0)


@triton.jit
def scaled_sums(w, scale, row, RUN: tl.constexpr):
    """Returns sums [PIECES, outputs, PIECE // RUN] of products of `scaled_weights` and `row` [PIECES, PIECE] float32."""
    products = w.to(tl.float32) * row[:, None, :]
    runs: tl.constexpr = (w.shape[0], w.shape[1], w.shape[2] // RUN, RUN)
    return tl.sum(tl.reshape(products, runs), axis=3) * scale[:, :, None]
