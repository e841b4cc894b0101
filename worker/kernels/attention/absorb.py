"""The two products of absorbed multi-head latent attention, which replace keys and values of each head.

DeepSeek-V2 (arXiv:2405.04434, section 2.1.2): the key up-projection is absorbed into the query, whose dot products
are then with latents. The value up-projection follows the sum over latents. Both are one small matrix a head. For a
few tokens they are read in half a microsecond, and the launch of a library's kernel takes several. These kernels are
one wave of programs that start early (`pdl.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.pdl import launch_options, reads_early, wait_for_previous
from mla_router.worker.kernels.weight import Weight

# With more tokens the library is faster at 128 heads on an H200 (`bench/kernels/bench_absorb.py`). With few heads it is
# faster at 128 tokens as well, but it starts later, and the rotation in front of it is one more kernel.
MAX_TOKENS, MAX_TOKENS_OF_FEW_HEADS = 32, 128
FEW_HEADS = 32
MAX_BLOCK_ROWS = 64


def absorb_queries(q: Tensor, w_uk: Weight) -> Tensor:
    """Returns q [T, H, D] @ w_uk [H, D, C] for each head, [T, H, C]. Both may be views, contiguous in the last
    axis, w_uk within a head."""
    w_uk = w_uk.dense(q.dtype)
    if on_gpu(q) and is_small(q.shape[0], *w_uk.values.shape):
        return absorb_queries_triton(q, w_uk.values, constant=w_uk.constant)
    return absorb_queries_torch(q, w_uk.values)


def expand_values(latent: Tensor, w_uv: Weight, out: Tensor) -> None:
    """Writes latent [T, H, C] @ w_uv [H, V, C] transposed, for each head, to out [T, H, V]. All may be views,
    contiguous in the last axis, w_uv within a head."""
    w_uv = w_uv.dense(latent.dtype)
    heads, outputs, inputs = w_uv.values.shape
    if on_gpu(latent) and is_small(latent.shape[0], heads, inputs, outputs):
        expand_values_triton(latent, w_uv.values, out, constant=w_uv.constant)
    else:
        expand_values_torch(latent, w_uv.values, out)


def is_small(tokens: int, heads: int, inputs: int, outputs: int) -> bool:
    """Whether the kernels serve so many tokens and heads, and matrices of so many inputs and outputs."""
    most = MAX_TOKENS_OF_FEW_HEADS if heads <= FEW_HEADS else MAX_TOKENS
    return 0 < tokens <= most and _is_cut(inputs) and outputs % 128 == 0


def tiling(heads: int, tokens: int) -> tuple[int, int]:
    """Returns the columns of a program for absorbed queries and for values: the fastest on an H200, for 16 heads in
    whole steps, for 128 heads by themselves."""
    if heads <= FEW_HEADS:
        return 64, 16 if tokens < 8 else 32
    return 64 if tokens <= 16 else 128, 32


def absorb_queries_torch(q: Tensor, w_uk: Tensor) -> Tensor:
    return torch.bmm(q.transpose(0, 1), w_uk).transpose(0, 1)


def expand_values_torch(latent: Tensor, w_uv: Tensor, out: Tensor) -> None:
    torch.bmm(latent.transpose(0, 1), w_uv.transpose(1, 2), out=out.transpose(0, 1))


def absorb_queries_triton(
    q: Tensor, w_uk: Tensor, *, constant: bool = False, columns: int | None = None
) -> Tensor:
    """C is a multiple of the columns of a program, D a power of 2, at least 64. With `constant` the weight is read
    before the wait (`pdl.py`). `columns` replaces `tiling`, for benchmarks."""
    tokens, heads, _ = q.shape
    out = q.new_empty(tokens, heads, w_uk.shape[2])
    columns = columns or tiling(heads, tokens)[0]
    _launch(q, w_uk, out, columns, transposed=False, constant=constant)
    return out


def expand_values_triton(
    latent: Tensor,
    w_uv: Tensor,
    out: Tensor,
    *,
    constant: bool = False,
    columns: int | None = None,
) -> None:
    """V is a multiple of the columns of a program, C a power of 2, at least 64. `constant`, `columns`: see
    `absorb_queries_triton`."""
    tokens, heads, _ = latent.shape
    columns = columns or tiling(heads, tokens)[1]
    _launch(latent, w_uv, out, columns, transposed=True, constant=constant)


def _is_cut(inputs: int) -> bool:
    """Whether the inputs can be cut into four blocks for products."""
    return inputs >= 64 and inputs & (inputs - 1) == 0


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, columns: int, *, transposed: bool, constant: bool
) -> None:
    work = absorb_work(x, weight, out, columns, transposed=transposed, constant=constant)
    tokens, heads, _ = x.shape
    _absorb_kernel[(work.programs, heads, work.row_blocks(tokens))](
        work, tokens, num_warps=4, **launch_options()
    )


class AbsorbWork(NamedTuple):
    """The arguments of `absorb_program`: out [T, OUTPUTS] = x [T, INPUTS] @ weight for each head. TRANSPOSED: the
    weight has a row for each output."""

    x: Tensor
    weight: Tensor
    out: Tensor
    x_stride_t: int
    x_stride_h: int
    weight_stride: int
    out_stride_t: int
    out_stride_h: int
    INPUTS: tl.constexpr
    OUTPUTS: tl.constexpr
    BLOCK_ROWS: tl.constexpr
    BLOCK_OUTPUTS: tl.constexpr
    BLOCK_INPUTS: tl.constexpr
    TRANSPOSED: tl.constexpr
    AHEAD: tl.constexpr  # a program loads all of its weights at once, before the wait

    @property
    def programs(self) -> int:
        """Programs for one head and BLOCK_ROWS tokens."""
        return int(self.OUTPUTS.value) // int(self.BLOCK_OUTPUTS.value)

    def row_blocks(self, tokens: int) -> int:
        return -(-tokens // int(self.BLOCK_ROWS.value))


def absorb_work(
    x: Tensor, weight: Tensor, out: Tensor, columns: int, *, transposed: bool, constant: bool
) -> AbsorbWork:
    """Returns the arguments for any number of tokens. Checks shapes and strides."""
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
    # Programs that hold all of their weights need many registers: with more rows too few of them fit at a time
    ahead = constant and tokens <= (32 if heads <= FEW_HEADS else 16)
    return AbsorbWork(
        x,
        weight,
        out,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        out.stride(0),
        out.stride(1),
        INPUTS=tl.constexpr(inputs),
        OUTPUTS=tl.constexpr(outputs),
        BLOCK_ROWS=tl.constexpr(min(max(triton.next_power_of_2(tokens), 16), MAX_BLOCK_ROWS)),
        BLOCK_OUTPUTS=tl.constexpr(columns),
        BLOCK_INPUTS=tl.constexpr(inputs if ahead else inputs // 4),
        TRANSPOSED=tl.constexpr(transposed),
        AHEAD=tl.constexpr(ahead),
    )


@reads_early({"work.AHEAD": ("work.weight",)})
@triton.jit(do_not_specialize=["tokens"])
def _absorb_kernel(work, tokens):
    absorb_program(tl.program_id(0), tl.program_id(1), tl.program_id(2), work, tokens)


@triton.jit
def absorb_program(block, head, row_block, work, tokens):
    """Computes BLOCK_OUTPUTS columns of one head's product for BLOCK_ROWS tokens. Waits for the previous kernel."""
    if not work.AHEAD:
        wait_for_previous()
    INPUTS: tl.constexpr = work.INPUTS
    OUTPUTS: tl.constexpr = work.OUTPUTS
    BLOCK_INPUTS: tl.constexpr = work.BLOCK_INPUTS
    weight = work.weight + head.to(tl.int64) * work.weight_stride
    row = row_block * work.BLOCK_ROWS + tl.arange(0, work.BLOCK_ROWS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    column = block * work.BLOCK_OUTPUTS + tl.arange(0, work.BLOCK_OUTPUTS)
    is_row = (row < tokens)[:, None]
    x_at = work.x + row.to(tl.int64)[:, None] * work.x_stride_t + head * work.x_stride_h
    if work.AHEAD:
        w = _weight(weight, 0, inputs, column, INPUTS, OUTPUTS, work.TRANSPOSED)
        wait_for_previous()
        values = tl.load(x_at + inputs[None, :], mask=is_row, other=0.0)
        acc = tl.dot(values, w, input_precision="ieee")
    else:
        acc = tl.zeros([work.BLOCK_ROWS, work.BLOCK_OUTPUTS], tl.float32)
        # As many stages as steps: all loads are under way before the first product
        for start in tl.range(0, INPUTS, BLOCK_INPUTS, num_stages=INPUTS // BLOCK_INPUTS + 1):
            values = tl.load(x_at + start + inputs[None, :], mask=is_row, other=0.0)
            w = _weight(weight, start, inputs, column, INPUTS, OUTPUTS, work.TRANSPOSED)
            acc = tl.dot(values, w, acc, input_precision="ieee")
    at = work.out + row.to(tl.int64)[:, None] * work.out_stride_t + head * work.out_stride_h
    tl.store(at + column[None, :], acc.to(work.out.dtype.element_ty), mask=is_row)


@triton.jit
def _weight(
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
