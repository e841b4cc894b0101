"""x @ weight.T, for any number of rows.

Matrix libraries have tiles for many rows. With one row most of a tile is empty and few programs have work. Here
each program takes a few outputs and streams their weights once. `few_rows.py` has the kernel for 2 to 8 rows,
`linear_hopper.py` the one for up to 64 rows on Hopper, `quantized_linear.py` the kernels for quantized weights, and
`library.py` chooses the library for the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.few_rows import few_rows_linear, is_few
from mla_router.worker.kernels.library import library_linear
from mla_router.worker.kernels.linear_hopper import FEW_INPUTS, linear_hopper, suits_hopper
from mla_router.worker.kernels.pdl import launch_options, reads_early, start_next, wait_for_previous
from mla_router.worker.kernels.quantized_linear import quantized_linear, takes
from mla_router.worker.kernels.weight import Activations, Weight, dense_rows

# With more outputs the library is faster on an H200, unless inputs are few (docs/design/kernel_choices.md).
MAX_OUTPUTS = 32768


def linear(
    x: Activations,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns x @ weight.T + bias, [T, N], for x [T, K], weight [N, K] and bias [N]. Plain ones have one dtype.

    Products are summed in float32 and rounded once, to `out_dtype` (by default the dtype of x). A float32 result is
    not rounded at all: scores that are compared stay apart where 16 bits would make ties of them.
    """
    out_dtype = out_dtype or x.dtype
    if takes(x, weight):
        product = quantized_linear(x, weight, out_dtype=out_dtype)
        return product if bias is None else product.add_(bias)
    x = dense_rows(x)
    weight = weight.dense(x.dtype)
    matrix, constant = weight.values, weight.constant
    if not on_gpu(x):
        return linear_torch(x, matrix, bias, out_dtype=out_dtype)
    if bias is None and suits_hopper(x, matrix):
        return linear_hopper(x, matrix, out_dtype=out_dtype, constant=constant)
    if bias is None and x.shape[0] == 1 and is_ours(*matrix.shape):
        return linear_triton(x, matrix, out_dtype=out_dtype, constant=constant)
    if bias is None and is_few(x, matrix):
        return few_rows_linear(x, matrix, out_dtype=out_dtype, constant=constant)
    if out_dtype != x.dtype:
        assert bias is None, "a wider result has no bias"
        return torch.mm(x, matrix.t(), out_dtype=out_dtype)
    return library_linear(x, matrix, bias)


def is_ours(outputs: int, inputs: int) -> bool:
    """Whether the kernel serves the product of one row and weight [outputs, inputs]."""
    return outputs <= MAX_OUTPUTS or inputs <= FEW_INPUTS


def linear_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype
) -> Tensor:
    if out_dtype != x.dtype:
        x, weight = x.to(out_dtype), weight.to(out_dtype)
    return functional.linear(x, weight, bias)


def tiling(outputs: int) -> tuple[int, int, int]:
    """Returns outputs and inputs of a block, and warps: the fastest of a sweep on an H200 (`bench_linear.py`)."""
    return 2 if outputs <= 4096 else 4, 2048, 4


def linear_triton(
    x: Tensor,
    weight: Tensor,
    *,
    out_dtype: torch.dtype,
    constant: bool = False,
    tiles: tuple[int, int, int] | None = None,
) -> Tensor:
    """Multiplies one contiguous row, without a bias. With `constant` the weight is read before the wait (`pdl.py`).
    `tiles` replaces `tiling`, for benchmarks."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert weight.shape == (outputs, inputs) and weight.is_contiguous() and x.stride(1) == 1, (
        f"x {tuple(x.shape)} {x.stride()}, weight {tuple(weight.shape)} {weight.stride()}"
    )
    assert rows == 1, f"{rows} rows"
    block_outputs, block_inputs, num_warps = tiles or tiling(outputs)
    out = torch.empty(1, outputs, dtype=out_dtype, device=x.device)
    _linear_kernel[(triton.cdiv(outputs, block_outputs),)](
        x,
        weight,
        out,
        OUTPUTS=outputs,
        INPUTS=inputs,
        BLOCK_OUTPUTS=block_outputs,
        BLOCK_INPUTS=block_inputs,
        AHEAD=constant,
        num_warps=num_warps,
        **launch_options(),
    )
    return out


@reads_early({"AHEAD": ("weight",)})
@triton.jit
def _linear_kernel(
    x,
    weight,
    out,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    start_next()
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    is_output = output < OUTPUTS
    weight_at = weight + output.to(tl.int64)[:, None] * INPUTS + inputs[None, :]
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_INPUTS], tl.float32)
    if not AHEAD:
        wait_for_previous()
    w = _weights(weight_at, is_output, inputs, INPUTS)
    if AHEAD:
        wait_for_previous()
    for start in tl.range(0, INPUTS, BLOCK_INPUTS):
        a = tl.load(x + start + inputs, mask=start + inputs < INPUTS, other=0.0)
        acc += w.to(tl.float32) * a.to(tl.float32)[None, :]
        after = start + BLOCK_INPUTS
        w = _weights(weight_at + after, is_output, after + inputs, INPUTS)
    tl.store(out + output, tl.sum(acc, 1).to(out.dtype.element_ty), mask=is_output)


@triton.jit
def _weights(at, is_output, inputs, INPUTS: tl.constexpr):
    """Loads weights that are not read again in this step: they leave L2 first."""
    exists = is_output[:, None] & (inputs < INPUTS)[None, :]
    return tl.load(at, mask=exists, other=0.0, eviction_policy="evict_first")
