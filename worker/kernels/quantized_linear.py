"""x @ weight.T with a quantized weight.

The number of rows decides: one and a few stream the weight and are not quantized (`quantized_gemv.py`,
`quantized_few_rows.py`). More, and on Hopper all from 2 on with FP8, are quantized in groups of columns, for the kernel
below, for the one of Hopper with a ring of tiles (`quantized_linear_hopper.py`), or for torch's library. `row_form` tells
it to the op that computes the rows. `quantized_linear_torch` multiplies the same numbers on a CPU.

A step of the loop lies within one scale of the weight and one scale of the rows: the product of its quantized values is
multiplied by both and added to sums in float32. The tensor cores' own sums of FP8 have fewer bits (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_router.worker.kernels import quantized_few_rows as few_rows
from mla_router.worker.kernels.dequantize import repeat_rows
from mla_router.worker.kernels.dispatch import is_hopper, on_gpu
from mla_router.worker.kernels.moe.gemm_programs import block_and_column
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.kernels.quantize import (
    GROUP,
    as_quantized,
    has_kernel,
    has_whole_groups,
    padded_for_library,
    round_rows,
)
from mla_router.worker.kernels.quantized_gemv import quantized_gemv_triton
from mla_router.worker.kernels.quantized_linear_hopper import (
    in_ring,
    quantized_linear_hopper,
    suits_hopper,
)
from mla_router.worker.kernels.tuned import dense_tile
from mla_router.worker.kernels.weight import (
    PLAIN_ROWS,
    Activations,
    Quantized,
    RowForm,
    Weight,
    dense_rows,
)
from mla_router.worker.kernels.weight_scales import scaled, scaled_sums

# From so many rows on torch's library is faster than the kernel, by the least number of weights: on an H200, with
# medium weights on an H100 (`bench/kernels/bench_quantized.py`)
LIBRARY_ROWS = ((1 << 26, 17), (1 << 23, 128), (0, 192))
BLOCK = (128, 128)  # of weights that the library takes


class Tiles(NamedTuple):
    rows: int
    outputs: int
    inputs: int  # of a step
    num_warps: int = 4
    num_stages: int = 4
    group_m: int = 8  # blocks of rows that share weights in L2


def takes(x: Activations, weight: Weight) -> bool:
    """Whether `quantized_linear` serves the product. For other quantized weights a GPU has no kernel."""
    if weight.is_plain or not on_gpu(x):
        return not weight.is_plain
    return has_kernel(x, weight) and (not weight.weight_only or few_rows.is_few(*x.shape))


def row_form(x: Tensor, weight: Weight) -> RowForm:
    """Returns the form in which `linear` takes as many rows as x [T, ...] has, of its dtype."""
    rows, inputs = len(x), weight.values.shape[1]
    if weight.is_plain or weight.weight_only or not on_gpu(x) or not has_kernel(x, weight):
        return PLAIN_ROWS
    streams = few_rows.is_few(rows, inputs) and not suits_hopper(weight, rows)
    if streams or inputs < GROUP:
        return PLAIN_ROWS
    return RowForm(plain=False, quantized=weight.values.dtype)


def quantized_linear(x: Activations, weight: Weight, *, out_dtype: torch.dtype) -> Tensor:
    """Returns x @ weight.T [T, N] in `out_dtype`, for x [T, K] and a weight that it `takes`."""
    if not on_gpu(x):
        return quantized_linear_torch(dense_rows(x), weight, out_dtype=out_dtype)
    rows, outputs = x.shape[0], len(weight.values)
    if rows == 0:
        return torch.empty(0, outputs, dtype=out_dtype, device=x.device)
    if rows == 1:
        return quantized_gemv_triton(dense_rows(x), weight, out_dtype=out_dtype)
    if suits_hopper(weight, rows):
        values = as_quantized(x, weight.values.dtype)
        return quantized_linear_hopper(values, weight, out_dtype=out_dtype)
    if few_rows.is_few(*x.shape):
        return few_rows.few_rows_quantized(dense_rows(x), weight, out_dtype=out_dtype)
    if _suits_library(x, weight, out_dtype):
        return _library(x, weight)
    values = as_quantized(x, weight.values.dtype)
    tiles = tuned_tiles(rows, weight) or tiling(rows, outputs)
    return quantized_linear_triton(values, weight, out_dtype=out_dtype, tiles=tiles)


def _suits_library(x: Activations, weight: Weight, out_dtype: torch.dtype) -> bool:
    fewest = library_rows(weight.values.numel())
    has_library = weight.library_scales is not None and is_hopper(x.device)
    return x.shape[0] >= fewest and out_dtype == torch.bfloat16 and has_library


def library_rows(weights: int) -> int:
    """Returns the fewest rows for which torch's library multiplies a matrix of so many weights on Hopper."""
    return next(rows for least, rows in LIBRARY_ROWS if weights >= least)


def tuned_tiles(rows: int, weight: Weight) -> Tiles | None:
    """Returns the tiles of a table (`tuned.py`), or None."""
    found = dense_tile(weight, rows)
    if found is None:
        return None
    return Tiles(
        found.block_m,
        found.block_n,
        found.block_k,
        found.num_warps,
        found.num_stages,
        found.group_m,
    )


def quantized_linear_torch(x: Tensor, weight: Weight, *, out_dtype: torch.dtype) -> Tensor:
    """Quantizes the rows for which the kernels of Hopper do, and sums in float32. Dequantizes the weight in each call."""
    streams = few_rows.is_few(*x.shape) and not in_ring(weight, len(x))
    if weight.weight_only or streams or not has_whole_groups(weight):
        rows = x.float()
    else:
        rows = round_rows(x, weight.values.dtype)
    return functional.linear(rows, weight.dense(torch.float32).values).to(out_dtype)


def tiling(rows: int, outputs: int) -> Tiles:
    """Returns the fastest tiles of a sweep on an H200."""
    if rows <= 32:
        return Tiles(32, 32 if outputs < 4096 else 64, 128, 4, 4)
    if (rows <= 128 and outputs < 4096) or rows <= 64:
        return Tiles(64, 64, 128, 4, 4)
    return Tiles(64, 128, 128, 4, 4)


def for_library(weight: Weight) -> Weight:
    """Returns `weight` with `library_scales` if it is one matrix for which cuBLAS has a product on Hopper: those of 128
    columns and one row each if blocks have another height, such as that of joined parts of 10,944 rows. cuBLAS reads
    scales of 128 x 128 in rows of a multiple of 4."""
    is_fp8_matrix = weight.values.dtype == torch.float8_e4m3fn and weight.values.ndim == 2
    if not is_fp8_matrix or weight.scales is None or weight.block[1] != BLOCK[1]:
        return weight
    outputs, inputs = weight.values.shape
    if outputs % 16 or inputs % 128:
        return weight
    if weight.block != BLOCK:
        rows = repeat_rows(weight.scales, weight.block[0])[:outputs]
        return weight._replace(library_scales=rows.t().contiguous())
    missing = -weight.scales.shape[1] % 4
    scales = functional.pad(weight.scales, (0, missing)) if missing else weight.scales
    return weight._replace(library_scales=scales)


def _library(x: Activations, weight: Weight) -> Tensor:
    """cuBLAS's product with scales of blocks. It takes rows in multiples of 4, and reads their scales column by
    column."""
    assert weight.library_scales is not None
    dtype, scaling = weight.values.dtype, functional.ScalingType
    rows = padded_for_library(as_quantized(x, dtype))
    product = functional.scaled_mm(
        rows.values,
        weight.values.t(),
        rows.scales,
        scaling.BlockWise1x128,
        weight.library_scales.t(),
        scaling.BlockWise128x128 if weight.block == BLOCK else scaling.BlockWise1x128,
        output_dtype=x.dtype,
    )
    return product[: x.shape[0]]


def quantized_linear_triton(
    x: Quantized, weight: Weight, *, out_dtype: torch.dtype, tiles: Tiles
) -> Tensor:
    """Returns x @ weight.T [T, N] in `out_dtype`. x [T, K], contiguous in the last axis; K is a multiple of 16."""
    values = x.values
    assert weight.scales is not None
    (rows, inputs), outputs = values.shape, len(weight.values)
    assert values.stride(1) == 1 and weight.values.shape == (outputs, inputs)
    assert weight.block[1] >= inputs or weight.block[1] % tiles.inputs == 0, (
        f"{weight.block}, {tiles}"
    )
    assert x.group % tiles.inputs == 0, f"{x.group=}, {tiles}"
    out = torch.empty(rows, outputs, dtype=out_dtype, device=values.device)
    grid = triton.cdiv(rows, tiles.rows) * triton.cdiv(outputs, tiles.outputs)
    _quantized_linear_kernel[(grid,)](
        values,
        x.scales,
        TensorDescriptor.from_tensor(weight.values, [tiles.outputs, tiles.inputs]),
        weight.scales,
        out,
        rows,
        values.stride(0),
        *x.scales.stride(),
        tiles.group_m,
        OUTPUTS=outputs,
        INPUTS=inputs,
        SCALE_ROWS=weight.block[0],
        SCALE_COLUMNS=weight.block[1],
        X_GROUP=x.group,
        BLOCK_ROWS=tiles.rows,
        BLOCK_N=tiles.outputs,
        BLOCK_K=tiles.inputs,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize=["rows", "group_stride", "group_m"])
def _quantized_linear_kernel(
    x,
    x_scales,
    weight,
    weight_scales,
    out,
    rows,
    x_stride,
    row_stride,
    group_stride,
    group_m,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    X_GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    wait_for_previous()
    COLUMNS: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    SCALES: tl.constexpr = (INPUTS + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    block, column = block_and_column(tl.program_id(0), blocks, COLUMNS, group_m)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = column * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real = row < rows
    row = row.to(tl.int64)
    x_at = x + row[:, None] * x_stride + k[None, :]
    sums = tl.zeros((BLOCK_ROWS, BLOCK_N), tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        inside = real[:, None]
        if INPUTS % BLOCK_K:
            inside &= (start + k < INPUTS)[None, :]
        a = tl.load(x_at + start, inside, other=0.0)
        w = weight.load([first, start])
        a_scale_at = x_scales + row * row_stride + start // X_GROUP * group_stride
        a_scale = tl.load(a_scale_at, real, other=0.0)
        part = tl.dot(a, w.T)
        sums += scaled(
            part,
            a_scale,
            weight_scales,
            first,
            start // SCALE_COLUMNS,
            OUTPUTS,
            BLOCK_N,
            SCALE_ROWS,
            SCALES,
        )
    sums = scaled_sums(sums, weight_scales, first, OUTPUTS, BLOCK_N, SCALE_ROWS, SCALES)
    tl.store(
        out + row[:, None] * OUTPUTS + n[None, :],
        sums.to(out.dtype.element_ty),
        real[:, None] & (n < OUTPUTS)[None, :],
    )
