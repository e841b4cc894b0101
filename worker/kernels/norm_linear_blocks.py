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
from mla_router.worker.kernels.rms_norm import scaled

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
    *,
    constant: bool,
) -> None:
    """Writes product [T, N], total [T, K] if there is a residual, and normed [T, K] if it is not None. For the other
    arguments see `norm_linear`; K is at most 2048."""
    (rows, inputs), outputs = x.shape, len(weight)
    other = x if residual is None else residual
    _norm_linear_blocks_kernel[
        (triton.cdiv(outputs, BLOCK_OUTPUTS), triton.cdiv(rows, BLOCK_ROWS))
    ](
        x,
        other,
        norm_weight,
        weight,
        product,
        total,
        normed,
        x.stride(0),
        other.stride(0),
        eps,
        rows,
        OUTPUTS=outputs,
        INPUTS=inputs,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_OUTPUTS=BLOCK_OUTPUTS,
        # A product takes at least 16 inputs
        WIDTH=max(triton.next_power_of_2(triton.cdiv(inputs, PIECES)), 16),
        PIECES=PIECES,
        ADD=residual is not None,
        AHEAD=constant,
        num_warps=PIECES,
        **launch_options(),
    )


@reads_early({"AHEAD": ("weight", "norm_weight")})
@triton.jit(do_not_specialize=["rows"])
def _norm_linear_blocks_kernel(
    x,
    residual,
    norm_weight,
    weight,
    product,
    total,
    normed,
    x_stride,
    residual_stride,
    eps,
    rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
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
