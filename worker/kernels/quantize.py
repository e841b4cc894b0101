"""Quantization of activations, for products with quantized weights.

Each group of neighbouring columns of a row has its own scale, the group's largest magnitude divided by the largest
value of the type: the scheme of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2). Checkpoints whose activations have one
scale a row or a tensor are computed with groups as well: smaller groups have no larger error.

`quantize_rows` is a kernel of its own. A kernel whose result is needed quantized calls `quantized` at its end: norms, the
gated activation and the value up-projection of latent attention, which return rows in the `RowForm` of their products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.kernels.weight import Activations, Quantized, RowForm, Weight, dense_rows
from mla_router.worker.kernels.widen import to_float32

GROUP = 128
# Lower bound of a group's largest magnitude: the scale of a group of zeros has a finite inverse
SMALLEST = 1e-30
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}

# The largest shared memory of a block of the kernels for quantized weights
SHARED_BYTES = 114_688

ROWS_OF_LIBRARY = 4  # cuBLAS takes a multiple
_ROWS = 16  # of a program
# Adding and subtracting 1.5 * 2**23 rounds a float32 to an integer, ties to even
_ROUNDER = tl.constexpr(12582912.0)


def has_kernel(x: Activations, weight: Weight) -> bool:
    """Whether the product of x with a quantized weight, or with each of a stack, has a kernel: for 16-bit numbers, on a
    GPU with the conversions and the shared memory, and with whole groups of columns to a scale of the weight. Without a
    kernel the weight is dequantized first."""
    if weight.is_plain or not on_gpu(x):
        return False
    found = limits(x.device)
    converts = weight.values.dtype == torch.int8 or found.converts_e4m3
    return converts and found.shared_bytes >= SHARED_BYTES and has_whole_groups(weight)


def has_whole_groups(weight: Weight) -> bool:
    """Whether the kernels take the shape of a quantized weight: whole groups of columns to a scale, in rows of a multiple
    of 16 bytes."""
    inputs = weight.values.shape[-1]
    whole = weight.block[1] % GROUP == 0 or weight.block[1] >= inputs
    return whole and inputs % 16 == 0


def quantize_rows(x: Tensor, dtype: torch.dtype, group: int = GROUP) -> Quantized:
    """Returns x [T, K] in groups of `group` columns, the last of which may be narrower. `dtype` is float8_e4m3fn or int8.

    A value is x times the inverse of its scale, rounded to nearest even. NaN and infinite numbers become NaN in FP8,
    with the rest of an infinite number's group 0.
    """
    return (
        quantize_rows_triton(x, dtype, group) if on_gpu(x) else quantize_rows_torch(x, dtype, group)
    )


def as_quantized(x: Activations, dtype: torch.dtype) -> Quantized:
    """Returns x quantized to `dtype` in groups of GROUP columns: itself if it is."""
    if isinstance(x, Quantized) and (x.values.dtype, x.group) == (dtype, GROUP):
        return x
    return quantize_rows(dense_rows(x), dtype)


def in_form(x: Tensor, form: RowForm) -> Activations:
    """Returns x in the form of the products that take it, by a launch of its own: the definition of the ops that return
    rows in a form."""
    if form.quantized is None:
        return x
    return quantize_rows(x, form.quantized)._replace(plain=x if form.plain else None)


def empty_rows(x: Tensor, columns: int, form: RowForm) -> tuple[Tensor | None, Quantized | None]:
    """Returns memory for the plain and the quantized rows [T, columns] of `form`, for as many rows and of the dtype of x
    [T, ...]."""
    rows = x.shape[0]
    plain = x.new_empty(rows, columns) if form.plain else None
    if form.quantized is None:
        return plain, None
    return plain, _empty_quantized(x, columns, form.quantized)._replace(plain=plain)


def _empty_quantized(x: Tensor, columns: int, dtype: torch.dtype, group: int = GROUP) -> Quantized:
    """Returns memory for as many rows as x has, as cuBLAS reads it: with a multiple of ROWS_OF_LIBRARY rows, and the
    scales of a group of columns next to each other."""
    rows = len(x)
    padded = triton.cdiv(rows, ROWS_OF_LIBRARY) * ROWS_OF_LIBRARY
    values = torch.empty(padded, columns, dtype=dtype, device=x.device)
    groups = triton.cdiv(columns, group)
    scales = torch.empty(groups, padded, dtype=torch.float32, device=x.device).t()
    return Quantized(values[:rows], scales[:rows], group, x.dtype)


def no_rows(x: Tensor, form: RowForm) -> Quantized:
    """Returns the quantized rows of x [0, K]."""
    assert not len(x) and form.quantized is not None, f"x {tuple(x.shape)}, {form}"
    return _empty_quantized(x, x.shape[1], form.quantized)


def padded_for_library(x: Quantized) -> Quantized:
    """Returns x with the rows after it in its memory, whose numbers are undefined: a multiple of ROWS_OF_LIBRARY."""
    rows, columns = x.values.shape
    padded = triton.cdiv(rows, ROWS_OF_LIBRARY) * ROWS_OF_LIBRARY
    assert x.scales.stride() == (1, padded), f"{x.scales.stride()} of {rows} rows"
    return x._replace(
        values=x.values.as_strided((padded, columns), (columns, 1)),
        scales=x.scales.as_strided((padded, x.scales.shape[1]), (1, padded)),
        plain=None,
    )


def quantize_rows_torch(x: Tensor, dtype: torch.dtype, group: int = GROUP) -> Quantized:
    scaled, scales = _scaled_groups(x, dtype, group)
    values = scaled.to(dtype) if dtype.is_floating_point else scaled.round_().to(dtype)
    return Quantized(values.view(len(x), -1)[:, : x.shape[1]], scales, group, x.dtype)


def _scaled_groups(x: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """Returns the groups [T, ceil(K / group), group] of x divided by their scales, before they are rounded, and the
    scales [T, ceil(K / group)]."""
    rows, columns = x.shape
    groups = -(-columns // group)
    wide = functional.pad(x.float(), (0, groups * group - columns)).view(rows, groups, group)
    largest = wide.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1).clamp(min=SMALLEST)
    # By a tensor: torch on CUDA multiplies by the inverse of a plain number
    scales = largest / torch.full_like(largest, LARGEST[dtype])
    scaled = wide * scales.reciprocal()[..., None]
    # The scale is rounded, so the largest value may exceed the range by its last bit. torch's cast would make it NaN
    return scaled.clamp_(-LARGEST[dtype], LARGEST[dtype]), scales


def round_rows(x: Tensor, dtype: torch.dtype, group: int = GROUP) -> Tensor:
    """Returns the numbers [T, K] float32 for which the result of `quantize_rows_torch` stands."""
    scaled, scales = _scaled_groups(x, dtype, group)
    values = to_float32(scaled.to(dtype)) if dtype.is_floating_point else scaled.round_()
    return values.mul_(scales[..., None]).view(len(x), -1)[:, : x.shape[1]]


def quantize_rows_triton(x: Tensor, dtype: torch.dtype, group: int = GROUP) -> Quantized:
    rows, columns = x.shape
    assert x.stride(1) == 1, f"x {tuple(x.shape)} {x.stride()}"
    out = _empty_quantized(x, columns, dtype, group)
    _quantize_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(columns, group))](
        x,
        out.values,
        out.scales,
        rows,
        x.stride(0),
        out.scales.stride(1),
        COLUMNS=columns,
        GROUP=group,
        BLOCK=triton.next_power_of_2(group),
        ROWS=_ROWS,
        num_warps=4,
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize=["rows", "group_stride"])
def _quantize_kernel(
    x,
    values,
    scales,
    rows,
    x_stride,
    group_stride,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    wait_for_previous()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * GROUP + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < min(GROUP, COLUMNS - tl.program_id(1) * GROUP)
    mask = (row < rows)[:, None] & inside[None, :]
    block = tl.load(x + row[:, None] * x_stride + column[None, :], mask, other=0.0)
    rounded, scale = quantized(block.to(tl.float32), values.dtype.element_ty)
    tl.store(values + row[:, None] * COLUMNS + column[None, :], rounded, mask)
    tl.store(scales + row + tl.program_id(1) * group_stride, scale, row < rows)


@triton.jit
def quantized(block, DTYPE: tl.constexpr):
    """Returns a block [ROWS, GROUP] float32 in DTYPE, and the scale [ROWS] float32 of each row."""
    LARGEST: tl.constexpr = 127.0 if tl.int8 == DTYPE else 448.0
    # 1e-30 is SMALLEST
    largest = tl.maximum(tl.max(tl.abs(block), axis=1), 1e-30)
    scale = tl.div_rn(largest, LARGEST)
    scaled = block * tl.div_rn(1.0, scale)[:, None]
    if tl.int8 == DTYPE:
        scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
        return ((scaled + _ROUNDER) - _ROUNDER).to(tl.int8), scale
    # The conversion saturates
    return scaled.to(DTYPE), scale


@triton.jit
def store_quantized(
    part,
    first,
    values,
    scales,
    row,
    group_stride,
    exists,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr = 128,
):
    """Quantizes a part [BLOCK] of row `row` from column `first` on, in whole groups, and stores it if it `exists`."""
    if exists:
        BLOCK: tl.constexpr = part.shape[0]
        column = first + tl.arange(0, BLOCK)
        wide = tl.where(column < COLUMNS, part.to(tl.float32), 0.0)
        groups = tl.reshape(wide, (BLOCK // GROUP, GROUP))
        rounded, scale = quantized(groups, values.dtype.element_ty)
        tl.store(values + row * COLUMNS + column, tl.reshape(rounded, (BLOCK,)), column < COLUMNS)
        start = first + tl.arange(0, BLOCK // GROUP) * GROUP
        tl.store(scales + start // GROUP * group_stride + row, scale, start < COLUMNS)
