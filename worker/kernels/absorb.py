"""The two products of multi-head latent attention that take the place of keys and values of each head.

DeepSeek-V2 (arXiv:2405.04434, section 2.1.2): the key up-projection is absorbed into the query, which then
meets latents, and the value up-projection comes after the sum over latents. Both are one small matrix
a head: for a few tokens reading them takes half a microsecond, and starting a library's kernel
several. Here all of it is one wave of programs that start early (`pdl.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels import prefetch
from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.kernels.prefetch import fetch

MAX_ROWS = 0  # with more tokens the library; not yet measured on a GPU, hence never ours


def absorb_queries(q: Tensor, w_uk: Tensor) -> Tensor:
    """[T, H, C]: of each head q [T, H, D] @ w_uk [H, D, C]. Both may be views, contiguous in the last
    axis, w_uk within a head."""
    return (absorb_queries_triton if _ours(q) else absorb_queries_torch)(q, w_uk)


def expand_values(latent: Tensor, w_uv: Tensor, out: Tensor) -> None:
    """out [T, H, V] = latent [T, H, C] @ w_uv [H, V, C] transposed, of each head. All may be views,
    contiguous in the last axis, w_uv within a head."""
    (expand_values_triton if _ours(latent) else expand_values_torch)(latent, w_uv, out)


def _ours(x: Tensor) -> bool:
    return on_gpu(x) and 0 < x.shape[0] <= MAX_ROWS


def absorb_queries_torch(q: Tensor, w_uk: Tensor) -> Tensor:
    return torch.bmm(q.transpose(0, 1), w_uk).transpose(0, 1)


def expand_values_torch(latent: Tensor, w_uv: Tensor, out: Tensor) -> None:
    torch.bmm(latent.transpose(0, 1), w_uv.transpose(1, 2), out=out.transpose(0, 1))


def absorb_queries_triton(q: Tensor, w_uk: Tensor, *, columns: int = 64) -> Tensor:
    """C is a multiple of `columns`, of the result of one program; D a power of 2, at least 64."""
    tokens, heads, _ = q.shape
    out = q.new_empty(tokens, heads, w_uk.shape[2])
    _launch(q, w_uk, out, columns, transposed=False)
    return out


def expand_values_triton(latent: Tensor, w_uv: Tensor, out: Tensor, *, columns: int = 16) -> None:
    """V is a multiple of `columns`, C a power of 2, at least 64."""
    _launch(latent, w_uv, out, columns, transposed=True)


def _launch(x: Tensor, weight: Tensor, out: Tensor, columns: int, *, transposed: bool) -> None:
    tokens, heads, inputs = x.shape
    outputs = out.shape[2]
    matrix = (outputs, inputs) if transposed else (inputs, outputs)
    assert weight.shape == (heads, *matrix) and out.shape[:2] == (tokens, heads) and tokens, (
        f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, out {tuple(out.shape)}"
    )
    assert (
        x.stride(2) == out.stride(2) == weight.stride(2) == 1 and weight.stride(1) == matrix[1]
    ), f"strides of x {x.stride()}, weight {weight.stride()}, out {out.stride()}"
    assert outputs % columns == 0 and inputs & (inputs - 1) == 0 and inputs >= 64, (
        f"{inputs} to {outputs}"
    )
    block_rows = min(max(triton.next_power_of_2(tokens), 16), 64)
    _absorb_kernel[(outputs // columns, heads, triton.cdiv(tokens, block_rows))](
        x,
        weight,
        out,
        tokens,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        out.stride(0),
        out.stride(1),
        INPUTS=inputs,
        OUTPUTS=outputs,
        BLOCK_ROWS=block_rows,
        BLOCK_OUTPUTS=columns,
        BLOCK_INPUTS=inputs // 4,
        TRANSPOSED=transposed,
        PREFETCH=prefetch.OWN,
        num_warps=4,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["tokens"])
def _absorb_kernel(
    x,
    weight,
    out,
    tokens,
    x_stride_t,
    x_stride_h,
    weight_stride,
    out_stride_t,
    out_stride_h,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """BLOCK_OUTPUTS columns of one head's product, for BLOCK_ROWS tokens. TRANSPOSED: the weight has a
    row for each output."""
    block, head = tl.program_id(0), tl.program_id(1)
    weight += head.to(tl.int64) * weight_stride
    if PREFETCH:
        # An equal part of the head's matrix, which need not be that which this program reads
        size: tl.constexpr = INPUTS * BLOCK_OUTPUTS
        fetch(weight + block * size, size * weight.dtype.element_ty.primitive_bitwidth // 8)
    wait_for_previous()
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    column = block * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_row = (row < tokens)[:, None]
    x_at = x + row.to(tl.int64)[:, None] * x_stride_t + head * x_stride_h + inputs[None, :]
    acc = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
    # As many stages as steps: all loads are under way before the first product
    for start in tl.range(0, INPUTS, BLOCK_INPUTS, num_stages=INPUTS // BLOCK_INPUTS + 1):
        values = tl.load(x_at + start, mask=is_row, other=0.0)
        if TRANSPOSED:
            w = tl.trans(tl.load(weight + column[:, None] * INPUTS + start + inputs[None, :]))
        else:
            w = tl.load(weight + (start + inputs[:, None]) * OUTPUTS + column[None, :])
        acc = tl.dot(values, w, acc, input_precision="ieee")
    at = out + row.to(tl.int64)[:, None] * out_stride_t + head * out_stride_h + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=is_row)
