"""rms_norm of x or of x + residual, and the projection of the result, in one kernel: for one row, and for several
rows with few outputs (the router of a mixture of experts).

A norm of few rows is a kernel of few programs, and its launch takes longer than its work. Here every program of the
projection computes the norm for itself while its weights arrive. A row must fit into registers beside a few rows of
weights. With many rows and outputs the norm would be computed too often, and the library's products are faster
(`linear.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels import norm_linear_blocks
from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.linear import MAX_OUTPUTS, linear
from mla_router.worker.kernels.linear_hopper import is_fastest as hopper_is_fastest
from mla_router.worker.kernels.pdl import launch_options, reads_early, start_next, wait_for_previous
from mla_router.worker.kernels.quantize import empty_rows, store_quantized
from mla_router.worker.kernels.quantize import has_kernel as has_quantized_kernel
from mla_router.worker.kernels.quantized_gemv import MAX_NORM_INPUTS, norm_gemv_triton
from mla_router.worker.kernels.quantized_linear import row_form
from mla_router.worker.kernels.rms_norm import norm_rows, normalized
from mla_router.worker.kernels.rms_norm import tiling as norm_tiling
from mla_router.worker.kernels.weight import Activations, RowForm, Weight

MAX_INPUTS = 8192
FEW_OUTPUTS = 256
# For one row and more outputs: all programs read the row, and a longer one does not stay in the cache that `carveout.py`
# leaves. For V3's 7,168 inputs two kernels are faster (`bench/kernels/bench_joined.py`).
MAX_REREAD_INPUTS = 4096
# For several rows of V2-Lite's router. Two kernels are faster for more rows, and for V3's longer rows, which leave
# registers for few outputs (`bench/kernels/bench_joined.py`).
SHORT_INPUTS, MAX_ROWS, MAX_PRODUCTS = 2048, 256, 256 * 64
MAX_QUANTIZED_ROWS = 128  # if the normalized rows are kept quantized; measured in whole steps
# Rows from which blocks of rows share the weights (`norm_linear_blocks.py`); measured in whole steps
MIN_BLOCK_ROWS = 65


class NormLinear(NamedTuple):
    product: Tensor  # [T, N]
    total: Tensor  # [T, K], x + residual; x itself without a residual
    normed: Activations | None  # [T, K], in the form `keep`


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    *,
    out_dtype: torch.dtype | None = None,
    keep: RowForm | None = None,
) -> NormLinear:
    """Returns rms_norm(x + residual) @ weight.T, the sum, and the normalized rows in the form `keep`, for other products.

    x and residual [T, K], norm_weight [K] and weight [N, K], the plain ones of one dtype, to which sum and normalized
    row are each rounded, as `add_rms_norm` does; the product to `out_dtype`, by default the same. If the weight is
    constant, so is norm_weight.

    The definition is one op after the other, which also runs wherever no kernel does both.
    """
    out_dtype = out_dtype or x.dtype
    if weight.is_plain and has_kernel(x, len(weight.values), keep):
        return norm_linear_triton(
            x,
            residual,
            norm_weight,
            eps,
            weight.values,
            out_dtype=out_dtype,
            keep=keep,
            constant=weight.constant,
        )
    if len(x) == 1 and keep is None and joins_quantized(x, weight):
        product, total = norm_gemv_triton(
            x, residual, norm_weight, eps, weight, out_dtype=out_dtype
        )
        return NormLinear(product, total, None)
    form = row_form(x, weight)
    normed, total = norm_rows(x, residual, norm_weight, eps, form | keep if keep else form)
    product = linear(normed, weight, out_dtype=out_dtype)
    return NormLinear(product, total, normed if keep else None)


def joins_quantized(x: Tensor, weight: Weight) -> bool:
    """Whether one row's norm joins the product with a quantized weight."""
    return weight.values.shape[1] <= MAX_NORM_INPUTS and has_quantized_kernel(x, weight)


def has_kernel(x: Tensor, outputs: int, keep: RowForm | None = None) -> bool:
    """Whether one kernel serves x [T, K] and this many outputs, and the normalized rows are kept in the form `keep`."""
    rows, inputs = x.shape
    if not on_gpu(x):
        return False
    if rows == 1:
        if outputs <= FEW_OUTPUTS:
            return inputs <= MAX_INPUTS
        is_short = inputs <= MAX_REREAD_INPUTS and outputs <= MAX_OUTPUTS
        return is_short and not hopper_is_fastest(x, outputs, inputs)
    few = outputs <= FEW_OUTPUTS and rows * outputs <= MAX_PRODUCTS
    most = MAX_QUANTIZED_ROWS if keep and keep.quantized else MAX_ROWS
    return 1 < rows <= most and inputs <= SHORT_INPUTS and few


def tiling(rows: int, inputs: int, outputs: int) -> tuple[int, int]:
    """Returns outputs of a program, and warps. There are as many warps as in `rms_norm`, so that sums have the same
    order. With more rows there are more programs, and each takes more outputs."""
    warps = norm_tiling(inputs)[1]
    if rows == 1 and outputs > FEW_OUTPUTS:
        return 4 if inputs <= SHORT_INPUTS else 8, warps
    return min(max(triton.next_power_of_2(rows) // 2, 1), 8), warps


def norm_linear_triton(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    *,
    out_dtype: torch.dtype,
    keep: RowForm | None = None,
    constant: bool = False,
    tiles: tuple[int, int] | None = None,
) -> NormLinear:
    """Takes at most MAX_ROWS rows of MAX_INPUTS inputs. x and residual may be views, contiguous in the last axis. With
    `constant` both weights are read before the wait (`pdl.py`). `tiles` replaces `tiling`, for benchmarks."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    other = x if residual is None else residual
    assert (
        0 < rows <= MAX_ROWS
        and inputs <= MAX_INPUTS
        and other.shape == x.shape
        and norm_weight.shape == (inputs,)
        and weight.shape == (outputs, inputs)
        and x.dtype == other.dtype == norm_weight.dtype == weight.dtype
        and x.stride(1) == other.stride(1) == norm_weight.stride(0) == 1
        and weight.is_contiguous()
    ), (
        f"x {tuple(x.shape)} {x.stride()} {x.dtype}, residual {tuple(other.shape)} {other.stride()} "
        f"{other.dtype}, norm_weight {tuple(norm_weight.shape)} {norm_weight.dtype}, "
        f"weight {tuple(weight.shape)} {weight.stride()} {weight.dtype}"
    )
    product = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    total = x if residual is None else x.new_empty(rows, inputs)
    normed, quantized = empty_rows(x, inputs, keep) if keep else (None, None)
    kept = normed if quantized is None else quantized
    if rows >= MIN_BLOCK_ROWS and tiles is None:
        assert inputs <= SHORT_INPUTS, f"{rows} rows of {inputs}: programs have whole rows"
        norm_linear_blocks.launch(
            x,
            residual,
            norm_weight,
            eps,
            weight,
            product,
            total,
            normed,
            quantized,
            constant=constant,
        )
        return NormLinear(product, total, kept)
    block_outputs, num_warps = tiles or tiling(rows, inputs, outputs)
    _norm_linear_kernel[(triton.cdiv(outputs, block_outputs), rows)](
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
        OUTPUTS=outputs,
        INPUTS=inputs,
        BLOCK_OUTPUTS=block_outputs,
        BLOCK_INPUTS=triton.next_power_of_2(inputs),
        ADD=residual is not None,
        AHEAD=constant,
        num_warps=num_warps,
        **launch_options(),
    )
    return NormLinear(product, total, kept)


@reads_early({"AHEAD": ("weight", "norm_weight")})
@triton.jit(do_not_specialize=["group_stride"])
def _norm_linear_kernel(
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
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    ADD: tl.constexpr,
    AHEAD: tl.constexpr,
):
    start_next()
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    output = block * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    column = tl.arange(0, BLOCK_INPUTS)
    is_output, inside = (output < OUTPUTS)[:, None], column < INPUTS
    weight_at = weight + output.to(tl.int64)[:, None] * INPUTS + column[None, :]
    if not AHEAD:
        wait_for_previous()
    w = tl.load(weight_at, is_output & inside[None, :], other=0.0, eviction_policy="evict_first")
    scale = tl.load(norm_weight + column, inside, other=0.0)
    if AHEAD:
        wait_for_previous()
    values = tl.load(x + row * x_stride + column, inside, other=0.0)
    if ADD:
        more = tl.load(residual + row * residual_stride + column, inside, other=0.0)
    once = inside & (block == 0)
    if ADD:
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(total + row * INPUTS + column, values, once)
    a = normalized(values, scale, eps, INPUTS)
    if normed is not None:
        tl.store(normed + row * INPUTS + column, a, once)
    if quantized is not None:
        store_quantized(a, 0, quantized, scales, row, group_stride, block == 0, INPUTS)
    result = tl.sum(w.to(tl.float32) * a.to(tl.float32)[None, :], 1)
    tl.store(
        product + row * OUTPUTS + output, result.to(product.dtype.element_ty), output < OUTPUTS
    )
