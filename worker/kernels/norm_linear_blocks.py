"""`norm_linear` of many rows and few outputs, by blocks of rows on tensor cores: V2-Lite's router from 65 tokens on.

Every program normalizes its rows for itself, so it takes many rows. All inputs of its rows are in registers, since
their sum of squares comes before the first product. Each warp multiplies one piece of the inputs: a product of 16
rows and few outputs would occupy only one or two warps.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.pdl import launch_options, reads_early, wait_for_previous
from mla_router.worker.kernels.quantize import GROUP
from mla_router.worker.kernels.quantize import quantized as quantized_groups
from mla_router.worker.kernels.rms_norm import scaled
from mla_router.worker.kernels.weight import Quantized

BLOCK_ROWS, BLOCK_OUTPUTS = 16, 8  # of a program
PIECES = 8  # of the inputs, and warps


def launch(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    product: Tensor,
    total: Tensor,
    normed: Tensor | None,
    quantized: Quantized | None,
    *,
    constant: bool,
) -> None:
    """Writes product [T, N], total [T, K] if there is a residual, and the normalized rows [T, K] to `normed` and
    `quantized` if these are not None. For the other arguments see `norm_linear`; K is at most 2048."""
    (rows, inputs), outputs = x.shape, len(weight)
    programs = triton.cdiv(outputs, BLOCK_OUTPUTS)  # which share the columns to quantize
    other = x if residual is None else residual
    _norm_linear_blocks_kernel[(programs, triton.cdiv(rows, BLOCK_ROWS))](
        x,
        other,
        norm_weight,
        weight,
        product,
        total,
        normed,
        quantized and quantized.values,
        quantized and quantized.scales,
        x.stride(0),
        other.stride(0),
        quantized.scales.stride(1) if quantized else 0,
        eps,
        rows,
        OUTPUTS=outputs,
        INPUTS=inputs,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_OUTPUTS=BLOCK_OUTPUTS,
        # A product takes at least 16 inputs
        WIDTH=max(triton.next_power_of_2(triton.cdiv(inputs, PIECES)), 16),
        PIECES=PIECES,
        SHARE=triton.next_power_of_2(triton.cdiv(triton.cdiv(inputs, GROUP), programs)) * GROUP,
        GROUP=GROUP,
        ADD=residual is not None,
        AHEAD=constant,
        num_warps=PIECES,
        **launch_options(),
    )


@reads_early({"AHEAD": ("weight", "norm_weight")})
@triton.jit(do_not_specialize=["rows", "group_stride"])
def _norm_linear_blocks_kernel(
    x,
    residual,
    norm_weight,
    weight,
    product,
    total,
    normed,
    quantized,
    scales,
    x_stride,
    residual_stride,
    group_stride,
    eps,
    rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    SHARE: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Tiles are [PIECES, rows or outputs, WIDTH]."""
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    column = tl.arange(0, PIECES)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    inside = column < INPUTS
    is_weight = (output < OUTPUTS)[None, :, None] & inside
    mine = (row < rows)[None, :, None] & inside
    once = mine & (tl.program_id(0) == 0)
    at = row.to(tl.int64)[None, :, None]
    weight_at = weight + output[None, :, None] * INPUTS + column
    if not AHEAD:
        wait_for_previous()
    w = tl.load(weight_at, is_weight, other=0.0)
    scale = tl.load(norm_weight + column, inside, other=0.0)
    if AHEAD:
        wait_for_previous()
    values = tl.load(x + at * x_stride + column, mine, other=0.0)
    if ADD:
        more = tl.load(residual + at * residual_stride + column, mine, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(total + at * INPUTS + column, values, once)
    wide = values.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(tl.sum(wide * wide, 2), 0) / INPUTS + eps)
    a = scaled(values, inverse_rms[None, :, None], scale)
    if normed is not None:
        tl.store(normed + at * INPUTS + column, a, once)
    parts = tl.dot(a, tl.permute(w, (0, 2, 1)), input_precision="ieee")
    tl.store(
        product + row[:, None] * OUTPUTS + output[None, :],
        tl.sum(parts, 0).to(product.dtype.element_ty),
        (row < rows)[:, None] & (output < OUTPUTS)[None, :],
    )
    if quantized is not None:
        _quantize_share(
            x + row.to(tl.int64)[:, None] * x_stride,
            residual + row.to(tl.int64)[:, None] * residual_stride,
            norm_weight,
            inverse_rms,
            quantized,
            scales,
            row,
            rows,
            group_stride,
            INPUTS,
            SHARE,
            GROUP,
            ADD,
        )


@triton.jit
def _quantize_share(
    x_at,
    residual_at,
    norm_weight,
    inverse_rms,
    quantized,
    scales,
    row,
    rows,
    group_stride,
    INPUTS: tl.constexpr,
    SHARE: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
):
    """Quantizes SHARE columns of the normalized rows. They are read again: there are no registers to keep them quantized
    beside the weights."""
    column = tl.program_id(0) * SHARE + tl.arange(0, SHARE)[None, :]
    mine = (row < rows)[:, None] & (column < INPUTS)
    values = tl.load(x_at + column, mine, other=0.0)
    if ADD:
        more = tl.load(residual_at + column, mine, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
    scale = tl.load(norm_weight + column, column < INPUTS, other=0.0)
    a = tl.where(mine, scaled(values, inverse_rms[:, None], scale).to(tl.float32), 0.0)
    EACH: tl.constexpr = SHARE // GROUP
    groups = tl.reshape(a, (a.shape[0] * EACH, GROUP))
    rounded, of_groups = quantized_groups(groups, quantized.dtype.element_ty)
    at = row.to(tl.int64)[:, None]
    tl.store(quantized + at * INPUTS + column, tl.reshape(rounded, a.shape), mine)
    group = tl.program_id(0) * EACH + tl.arange(0, EACH)[None, :]
    tl.store(
        scales + group * group_stride + at,
        tl.reshape(of_groups, (a.shape[0], EACH)),
        (row < rows)[:, None] & (group * GROUP < INPUTS),
    )
