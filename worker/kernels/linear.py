"""x @ weight.T, for batches of any size.

Matrix libraries tile for many rows. For one, or for a few rows and few outputs, most of such a tile is
empty and few programs have work; here each program takes a few outputs, whose weights it streams once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous

# Where the library is as fast on an H200 (`bench/kernels/bench_linear.py`).
MAX_OUTPUTS = 32768
FEW_OUTPUTS, FEW_ROWS = 256, 8


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
    if bias is None and is_small(x.shape[0], weight.shape[0]):
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


def is_small(rows: int, outputs: int) -> bool:
    """Whether our kernel is for it."""
    if outputs <= FEW_OUTPUTS:
        return 0 < rows <= FEW_ROWS
    return rows == 1 and outputs <= MAX_OUTPUTS


def tiling(rows: int, outputs: int) -> tuple[int, int, int]:
    """Outputs and inputs of a block, and warps: the best that the bench's sweep found on an H200."""
    if outputs <= FEW_OUTPUTS:
        return 2, 2048 if rows <= 4 else 1024, 8
    return 2 if outputs <= 4096 else 4, 2048, 4


def linear_triton(
    x: Tensor,
    weight: Tensor,
    *,
    out_dtype: torch.dtype,
    tiles: tuple[int, int, int] | None = None,
) -> Tensor:
    """No bias, at most FEW_ROWS rows. x may be a view, contiguous in its last axis. `tiles` is for
    measuring others than `tiling`'s."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert weight.shape == (outputs, inputs) and weight.is_contiguous() and x.stride(1) == 1, (
        f"x {tuple(x.shape)} {x.stride()}, weight {tuple(weight.shape)} {weight.stride()}"
    )
    assert 0 < rows <= FEW_ROWS, f"{rows} rows"
    block_outputs, block_inputs, num_warps = tiles or tiling(rows, outputs)
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    _linear_kernel[(triton.cdiv(outputs, block_outputs),)](
        x,
        weight,
        out,
        rows,
        x.stride(0),
        OUTPUTS=outputs,
        INPUTS=inputs,
        BLOCK_ROWS=triton.next_power_of_2(rows),
        BLOCK_OUTPUTS=block_outputs,
        BLOCK_INPUTS=block_inputs,
        num_warps=num_warps,
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x,
    weight,
    out,
    rows,
    x_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    wait_for_previous()
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    row = tl.arange(0, BLOCK_ROWS)
    is_row, is_output = row < rows, output < OUTPUTS
    x_at = x + row[:, None] * x_stride + inputs[None, :]
    weight_at = weight + output.to(tl.int64)[:, None] * INPUTS + inputs[None, :]
    acc = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_INPUTS], tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_INPUTS):
        exists = (start + inputs < INPUTS)[None, :]
        # Nobody reads a weight a second time before all others have been read
        w = tl.load(
            weight_at + start,
            mask=is_output[:, None] & exists,
            other=0.0,
            eviction_policy="evict_first",
        )
        a = tl.load(x_at + start, mask=is_row[:, None] & exists, other=0.0)
        acc += w.to(tl.float32)[None, :, :] * a.to(tl.float32)[:, None, :]
    at = out + row.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    result = tl.sum(acc, 2).to(out.dtype.element_ty)
    tl.store(at, result, mask=is_row[:, None] & is_output[None, :])
