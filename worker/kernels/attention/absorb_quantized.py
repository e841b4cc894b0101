"""Quantized W_UK and W_UV in the products of `absorb.py`: each head's matrix is one of a batch.

The values stay in memory with one byte. There are two forms:

* Cast at use: values become float16 in registers, where they are exact. Each row of inputs is divided by a
  power of 2 to fit into float16, so that bfloat16 inputs are exact as well.
* Static FP8 (`StaticFP8`): the inputs are rounded to FP8 with a scale that is known before the launch, and tensor cores
  multiply FP8 by FP8. Their sums have few bits: after each step of 128 inputs they are added to sums in float32
  (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).

A scale of many inputs, or of an output, multiplies sums. Where each input has its own scale, the input is multiplied by
its share of the largest scale of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels import quantize
from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.kv_cache.fp8 import from_cache, is_fp8, largest_of, stored, to_cache
from mla_router.worker.kernels.pdl import wait_for_previous
from mla_router.worker.kernels.weight import Weight
from mla_router.worker.kernels.weight_scales import as_float16

BLOCK_INPUTS = 128  # of a step
MAX_COLUMNS = 128  # outputs of a program


class StaticFP8(NamedTuple):
    """The FP8 format of the inputs of a product, float8_e4m3fn or float8_e5m2: x is rounded to x / scale."""

    dtype: torch.dtype
    scale: float = 1.0


def takes_heads(weight: Weight, dtype: torch.dtype, *, rows: Sequence[int]) -> bool:
    """Whether `weight` [H * sum(rows), C] stays quantized: all products with inputs of `dtype` have kernels, those of
    prefill, with the whole weight, and of decode, with W_UK and W_UV of each head, which lie one below the other with
    `rows` rows. A CPU decides by the shape alone, so that it rounds the activations of the same products as a GPU."""
    values = weight.values
    if weight.weight_only or values.dtype not in quantize.LARGEST or not weight.splits(rows):
        return False  # prefill would dequantize a weight-only format for each product
    x = values.new_empty(0, dtype=dtype)
    if not (quantize.has_kernel(x, weight) if x.is_cuda else quantize.has_whole_groups(weight)):
        return False
    w_uk, w_uv = weight.split_heads(rows)
    return has_kernel(w_uk, transposed=False) and has_kernel(w_uv, transposed=True)


def has_kernel(weight: Weight, *, transposed: bool) -> bool:
    """Whether the kernels serve a stack of quantized matrices: of whole tiles, with scales that are constant in a tile
    along its inputs or along its outputs, on a GPU with the conversion."""
    _, rows, columns = weight.values.shape
    inputs, outputs = (columns, rows) if transposed else (rows, columns)
    is_tiled = inputs >= 64 and inputs & (inputs - 1) == 0 and outputs % MAX_COLUMNS == 0
    is_e4m3 = weight.values.dtype == torch.float8_e4m3fn
    converts = not is_e4m3 or limits(weight.values.device).converts_e4m3
    return is_tiled and converts and _is_separable(weight, MAX_COLUMNS, transposed=transposed)


def rounded_inputs(x: Tensor, weight: Weight, fp8: StaticFP8 | None, *, transposed: bool) -> Tensor:
    """Returns x [T, H, K] rounded to FP8, in its own dtype.

    Where each input has its own scale of the weight, the scales are part of the inputs: an input is first multiplied by
    its share of the largest scale among BLOCK_INPUTS neighbours.
    """
    if fp8 is None:
        return x
    if weight.scales is None or transposed or weight.block[0] != 1:
        return from_cache(to_cache(x, fp8.dtype, fp8.scale), x.dtype, fp8.scale)
    scales = weight.scales[..., 0]  # [H, K]
    step = min(scales.shape[1], BLOCK_INPUTS)
    steps = scales.reshape(len(scales), -1, step)
    shares = (steps / steps.amax(-1, keepdim=True)).flatten(1)
    rounded = to_cache(x.float() * shares, fp8.dtype, fp8.scale)
    plain: Tensor = rounded.float() * fp8.scale / shares
    return plain.to(x.dtype)


class QuantizedMatrix(NamedTuple):
    """The scales of a stack of matrices, as the kernels read them. The scale of input i and output o of a head is at i
    // INPUT_SPAN * INPUT_STRIDE + o // OUTPUT_SPAN * OUTPUT_STRIDE. FORMAT: the FP8 format of the inputs, with its
    LARGEST number; 0 if they are not rounded."""

    scales: Tensor | None
    stride: int = 0  # of a head
    input_scale: float = 1.0
    inverse_input_scale: float = 1.0
    INPUT_SPAN: tl.constexpr = tl.constexpr(1)
    INPUT_STRIDE: tl.constexpr = tl.constexpr(1)
    OUTPUT_SPAN: tl.constexpr = tl.constexpr(1)
    OUTPUT_STRIDE: tl.constexpr = tl.constexpr(1)
    FORMAT: tl.constexpr = tl.constexpr(tl.float8e4nv)
    LARGEST: tl.constexpr = tl.constexpr(0.0)


PLAIN = QuantizedMatrix(None)


def quantized_matrix(
    weight: Weight, columns: int, *, transposed: bool, fp8: StaticFP8 | None
) -> QuantizedMatrix:
    """Returns the scales of `weight` for programs of `columns` outputs."""
    scales = weight.scales
    assert scales is not None and scales.stride(2) == 1
    assert _is_separable(weight, columns, transposed=transposed), f"{weight.block}, {columns=}"
    by_row = (weight.block[0], scales.stride(1))
    by_column = (weight.block[1], 1)
    inputs, outputs = (by_column, by_row) if transposed else (by_row, by_column)
    input_format, input_scale = tl.float8e4nv, 1.0
    if fp8 is not None:
        assert is_fp8(fp8.dtype) and is_fp8(weight.values.dtype), f"{fp8}, {weight.values.dtype}"
        input_format = tl.float8e5 if fp8.dtype == torch.float8_e5m2 else tl.float8e4nv
        input_scale = fp8.scale
    return QuantizedMatrix(
        scales,
        scales.stride(0),
        input_scale,
        1 / input_scale,
        INPUT_SPAN=tl.constexpr(inputs[0]),
        INPUT_STRIDE=tl.constexpr(inputs[1]),
        OUTPUT_SPAN=tl.constexpr(outputs[0]),
        OUTPUT_STRIDE=tl.constexpr(outputs[1]),
        FORMAT=tl.constexpr(input_format),
        LARGEST=tl.constexpr(largest_of(fp8.dtype) if fp8 else 0.0),
    )


def _is_separable(weight: Weight, columns: int, *, transposed: bool) -> bool:
    """Whether the outputs of a program share their scales, or all inputs share a scale."""
    _, rows, row_length = weight.values.shape
    inputs = row_length if transposed else rows
    of_rows, of_columns = weight.block
    input_span, output_span = (of_columns, of_rows) if transposed else (of_rows, of_columns)
    outputs = rows if transposed else row_length
    shared = output_span % columns == 0 or output_span >= outputs
    return shared or input_span >= inputs


@triton.jit
def quantized_sums(x_at, is_row, weight, head, column, work):
    """Returns the sums [BLOCK_ROWS, BLOCK_OUTPUTS] float32 of one head. With AHEAD it waits for the previous kernel,
    after it has loaded the weights. `work`: an `AbsorbWork`."""
    INPUTS: tl.constexpr = work.INPUTS
    OUTPUTS: tl.constexpr = work.OUTPUTS
    STEP: tl.constexpr = work.BLOCK_INPUTS
    SPAN: tl.constexpr = work.quantized.OUTPUT_SPAN
    STRIDE: tl.constexpr = work.quantized.OUTPUT_STRIDE
    # Otherwise each input has one scale for all outputs of the program
    EACH_OUTPUT: tl.constexpr = SPAN % work.BLOCK_OUTPUTS != 0 and SPAN < OUTPUTS
    inputs = tl.arange(0, STEP)
    scales = work.quantized.scales + head * work.quantized.stride
    of_inputs = scales + tl.min(column, 0) // SPAN * STRIDE
    acc = tl.zeros([work.BLOCK_ROWS, work.BLOCK_OUTPUTS], tl.float32)
    if work.AHEAD:
        tiles = tl.tuple(())
        for start in tl.static_range(0, INPUTS, STEP):
            tiles += (weight_tile(weight, start, inputs, column, INPUTS, OUTPUTS, work.TRANSPOSED),)
        wait_for_previous()
        for start in tl.static_range(0, INPUTS, STEP):
            x = tl.load(x_at + start + inputs[None, :], mask=is_row, other=0.0)
            at = of_inputs + (start + inputs) // work.quantized.INPUT_SPAN * (
                work.quantized.INPUT_STRIDE
            )
            acc += _step(x, tiles[start // STEP], at, EACH_OUTPUT, work.quantized)
    else:
        for start in tl.range(0, INPUTS, STEP):
            x = tl.load(x_at + start + inputs[None, :], mask=is_row, other=0.0)
            w = weight_tile(weight, start, inputs, column, INPUTS, OUTPUTS, work.TRANSPOSED)
            at = of_inputs + (start + inputs) // work.quantized.INPUT_SPAN * (
                work.quantized.INPUT_STRIDE
            )
            acc += _step(x, w, at, EACH_OUTPUT, work.quantized)
    if EACH_OUTPUT:
        acc *= tl.load(scales + column // SPAN * STRIDE)[None, :]
    return acc


@triton.jit
def _step(x, w, scales_at, EACH_OUTPUT: tl.constexpr, quantized):
    """Returns x [rows, inputs], times the scales of the inputs unless EACH_OUTPUT, @ w [inputs, outputs], in float32."""
    wide = x.to(tl.float32)
    factor = 1.0
    if not EACH_OUTPUT:
        scales = tl.load(scales_at)
        factor = tl.max(scales, axis=0)
        wide *= tl.div_rn(scales, tl.zeros_like(scales) + factor)[None, :]
    if quantized.LARGEST == 0:
        normal, power = as_float16(wide)
        part = tl.dot(normal, w.to(tl.float16)) * (power * factor)[:, None]
    else:
        narrow = stored(wide, quantized.FORMAT, quantized.inverse_input_scale, quantized.LARGEST)
        part = tl.dot(narrow, w) * (quantized.input_scale * factor)
    return part


@triton.jit
def weight_tile(
    weight,
    start,
    inputs,
    column,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Returns a block [inputs from `start`, columns] of the weight."""
    if TRANSPOSED:
        return tl.trans(tl.load(weight + column[:, None] * INPUTS + start + inputs[None, :]))
    return tl.load(weight + (start + inputs[:, None]) * OUTPUTS + column[None, :])
