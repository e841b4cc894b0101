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

from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous

# With more tokens the library is the faster at 128 heads on an H200 (`bench/kernels/bench_absorb.py`).
MAX_TOKENS = 32
FEW_HEADS = 32


def absorb_queries(q: Tensor, w_uk: Tensor) -> Tensor:
    """[T, H, C]: of each head q [T, H, D] @ w_uk [H, D, C]. Both may be views, contiguous in the last
    axis, w_uk within a head."""
    ours = on_gpu(q) and is_small(q.shape[0], *w_uk.shape[1:])
    return (absorb_queries_triton if ours else absorb_queries_torch)(q, w_uk)


def expand_values(latent: Tensor, w_uv: Tensor, out: Tensor) -> None:
    """out [T, H, V] = latent [T, H, C] @ w_uv [H, V, C] transposed, of each head. All may be views,
    contiguous in the last axis, w_uv within a head."""
    outputs, inputs = w_uv.shape[1:]
    ours = on_gpu(latent) and is_small(latent.shape[0], inputs, outputs)
    (expand_values_triton if ours else expand_values_torch)(latent, w_uv, out)


def is_small(tokens: int, inputs: int, outputs: int) -> bool:
    """Whether our kernel is for it."""
    return 0 < tokens <= MAX_TOKENS and _is_cut(inputs) and outputs % 128 == 0


def tiling(heads: int, tokens: int) -> tuple[int, int]:
    """Columns of one program, of absorbed queries and of values: the best for the pair that the bench's
    sweep found on an H200, for 16 and 128 heads."""
    few = heads <= FEW_HEADS
    latents = (32 if few else 64) if tokens <= 16 else 128
    return latents, 16 if few else 32


def absorb_queries_torch(q: Tensor, w_uk: Tensor) -> Tensor:
    return torch.bmm(q.transpose(0, 1), w_uk).transpose(0, 1)


def expand_values_torch(latent: Tensor, w_uv: Tensor, out: Tensor) -> None:
    torch.bmm(latent.transpose(0, 1), w_uv.transpose(1, 2), out=out.transpose(0, 1))


def absorb_queries_triton(q: Tensor, w_uk: Tensor, *, columns: int | None = None) -> Tensor:
    """C is a multiple of the columns of a program, D a power of 2, at least 64. `columns` is for measuring
    others than `tiling`'s."""
    tokens, heads, _ = q.shape
    out = q.new_empty(tokens, heads, w_uk.shape[2])
    _launch(q, w_uk, out, columns or tiling(heads, tokens)[0], transposed=False)
    return out


def expand_values_triton(
    latent: Tensor, w_uv: Tensor, out: Tensor, *, columns: int | None = None
) -> None:
    """V is a multiple of the columns of a program, C a power of 2, at least 64."""
    tokens, heads, _ = latent.shape
    _launch(latent, w_uv, out, columns or tiling(heads, tokens)[1], transposed=True)


def _is_cut(inputs: int) -> bool:
    """Into four blocks that products are made of."""
    return inputs >= 64 and inputs & (inputs - 1) == 0


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
    assert outputs % columns == 0 and _is_cut(inputs), f"{inputs} to {outputs}"
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
):
    """BLOCK_OUTPUTS columns of one head's product, for BLOCK_ROWS tokens. TRANSPOSED: the weight has a
    row for each output."""
    wait_for_previous()
    block, head = tl.program_id(0), tl.program_id(1)
    weight += head.to(tl.int64) * weight_stride
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
