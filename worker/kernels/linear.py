"""x @ weight.T, for batches of any size.

A decode step multiplies a few rows by every weight of the model: what it costs is the reading of the
weight. General matrix libraries tile for many rows, and split the sum to have enough blocks, which takes
a second kernel; here each program takes a few outputs and streams their rows of the weight once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from mla_router.worker.kernels.dispatch import on_gpu

# With more rows or outputs the library fills the GPU as well, and its tiles are taller.
MAX_ROWS = 64
MAX_OUTPUTS = 32768
MAX_SINGLE_ROWS = 4


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x @ weight.T + bias, [T, N], for x [T, K] and weight [N, K] of one dtype, bias [N].

    Products are summed in float32 and rounded once, to `out_dtype` (by default that of x). With
    float32 they are not rounded at all: scores that are compared keep what 16 bits would make ties of.
    """
    out_dtype = out_dtype or x.dtype
    if not on_gpu(x):
        return linear_torch(x, weight, bias, out_dtype=out_dtype)
    if bias is None and 0 < x.shape[0] <= MAX_ROWS and weight.shape[0] <= MAX_OUTPUTS:
        return linear_triton(x, weight, out_dtype=out_dtype)
    if out_dtype != x.dtype:
        assert bias is None, "a wider result has no bias"
        return torch.mm(x, weight.t(), out_dtype=out_dtype)
    return functional.linear(x, weight, bias)


def linear_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype
) -> Tensor:
    if out_dtype != x.dtype:
        x, weight = x.to(out_dtype), weight.to(out_dtype)
    return functional.linear(x, weight, bias)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Without `block_rows` each row is multiplied by itself, which is for few rows; with it, so many
    rows at a time go through the tensor cores."""

    block_rows: int | None
    block_outputs: int
    block_inputs: int
    num_warps: int
    num_stages: int  # of the pipeline of weights on their way


def tiling(rows: int, outputs: int) -> Tiling:
    """The best of those that `bench/kernels/bench_linear.py --sweep` tried on an H200."""
    if rows <= MAX_SINGLE_ROWS:
        return Tiling(None, 4, 1024, num_warps=4, num_stages=2)
    block_rows = max(16, triton.next_power_of_2(rows))
    if outputs <= 4096:
        return Tiling(block_rows, 16, 256 if block_rows <= 32 else 128, num_warps=4, num_stages=4)
    return Tiling(block_rows, 32, 128, num_warps=4, num_stages=5)


def linear_triton(
    x: Tensor, weight: Tensor, *, out_dtype: torch.dtype, tiles: Tiling | None = None
) -> Tensor:
    """At most MAX_ROWS rows, no bias. x may be a view, contiguous in its last axis."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert weight.shape == (outputs, inputs) and weight.is_contiguous() and x.stride(1) == 1, (
        f"x {tuple(x.shape)} {x.stride()}, weight {tuple(weight.shape)} {weight.stride()}"
    )
    tiles = tiles or tiling(rows, outputs)
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    grid = (triton.cdiv(outputs, tiles.block_outputs),)
    blocks = {
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "BLOCK_OUTPUTS": tiles.block_outputs,
        "BLOCK_INPUTS": tiles.block_inputs,
        "STAGES": tiles.num_stages,
        "num_warps": tiles.num_warps,
    }
    if tiles.block_rows is None:
        block_rows = triton.next_power_of_2(rows)
        _single_rows[grid](x, weight, out, rows, x.stride(0), BLOCK_ROWS=block_rows, **blocks)
        return out
    assert rows <= tiles.block_rows, f"{rows} rows, {tiles}"
    _block_of_rows[grid](x, weight, out, rows, x.stride(0), BLOCK_ROWS=tiles.block_rows, **blocks)
    return out


@triton.jit(do_not_specialize=["rows"])
def _single_rows(
    x,
    weight,
    out,
    rows,
    x_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    row = tl.arange(0, BLOCK_ROWS)
    is_row, is_output = row < rows, output < OUTPUTS
    weight_at = weight + output.to(tl.int64)[:, None] * INPUTS + inputs[None, :]
    acc = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_INPUTS], tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_INPUTS, num_stages=STAGES):
        exists = start + inputs < INPUTS
        w = tl.load(
            weight_at + start,
            mask=is_output[:, None] & exists[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        a = tl.load(
            x + row[:, None] * x_stride + (start + inputs)[None, :],
            mask=exists[None, :] & is_row[:, None],
            other=0.0,
        )
        acc += w.to(tl.float32)[None, :, :] * a.to(tl.float32)[:, None, :]
    at = out + row.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(at, tl.sum(acc, 2).to(out.dtype.element_ty), mask=is_output[None, :] & is_row[:, None])


@triton.jit(do_not_specialize=["rows"])
def _block_of_rows(
    x,
    weight,
    out,
    rows,
    x_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    row = tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    is_row, is_output = row < rows, output < OUTPUTS
    x_at = x + row[:, None] * x_stride + inputs[None, :]
    weight_at = weight + output.to(tl.int64)[:, None] * INPUTS + inputs[None, :]
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_INPUTS, num_stages=STAGES):
        if INPUTS % BLOCK_INPUTS == 0:
            w = tl.load(weight_at + start, mask=is_output[:, None], other=0.0)
            a = tl.load(x_at + start, mask=is_row[:, None], other=0.0)
        else:
            exists = (start + inputs < INPUTS)[None, :]
            w = tl.load(weight_at + start, mask=is_output[:, None] & exists, other=0.0)
            a = tl.load(x_at + start, mask=is_row[:, None] & exists, other=0.0)
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    at = out + row[None, :].to(tl.int64) * OUTPUTS + output[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])
