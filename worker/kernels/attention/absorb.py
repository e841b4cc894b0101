"""The two products of absorbed multi-head latent attention, which replace keys and values of each head.

DeepSeek-V2 (arXiv:2405.04434, section 2.1.2): the key up-projection is absorbed into the query, whose dot products
are then with latents. The value up-projection follows the sum over latents. Both are one small matrix a head. For a
few tokens they are read in half a microsecond, and the launch of a library's kernel takes several. These kernels are
one wave of programs that start early (`pdl.py`). Quantized matrices stay so in memory (`absorb_quantized.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.attention.absorb_quantized import (
    BLOCK_INPUTS,
    PLAIN,
    QuantizedMatrix,
    StaticFP8,
    has_kernel,
    quantized_matrix,
    quantized_sums,
    rounded_inputs,
    weight_tile,
)
from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.pdl import launch_options, reads_early, start_next, wait_for_previous
from mla_router.worker.kernels.weight import Weight

# With more tokens the library is faster at 128 heads on an H200 (`bench/kernels/bench_absorb.py`). With few heads it is
# faster at 128 tokens as well, but it starts later, and the rotation before it is one more kernel.
MAX_TOKENS, MAX_TOKENS_OF_FEW_HEADS = 32, 128
FEW_HEADS = 32
MAX_BLOCK_ROWS = 64
# With more rows sums are in tensor memory (sm_100), and a kernel for quantized weights would spill
MAX_BLOCK_ROWS_WITHOUT_TENSOR_MEMORY = 32


def absorb_queries(q: Tensor, w_uk: Weight, fp8: StaticFP8 | None = None) -> Tensor:
    """Returns q [T, H, D] @ w_uk [H, D, C] for each head, [T, H, C]. Both may be views, contiguous in the last
    axis, w_uk within a head. With `fp8` the queries are rounded to FP8 first."""
    if on_gpu(q) and is_served(len(q), w_uk, transposed=False):
        return absorb_queries_triton(q, w_uk, fp8)
    return absorb_queries_torch(q, w_uk, fp8)


def expand_values(latent: Tensor, w_uv: Weight, out: Tensor, fp8: StaticFP8 | None = None) -> None:
    """Writes latent [T, H, C] @ w_uv [H, V, C] transposed, for each head, to out [T, H, V]. All may be views,
    contiguous in the last axis, w_uv within a head. With `fp8` the latents are rounded to FP8 first."""
    if on_gpu(latent) and is_served(len(latent), w_uv, transposed=True):
        expand_values_triton(latent, w_uv, out, fp8)
    else:
        expand_values_torch(latent, w_uv, out, fp8)


def is_served(tokens: int, weight: Weight, *, transposed: bool) -> bool:
    """Whether the kernels are the fastest on a GPU for this many tokens and a stack of matrices. They serve any number
    of tokens with quantized matrices."""
    if not weight.is_plain:
        return tokens > 0 and has_kernel(weight, transposed=transposed)
    heads, rows, columns = weight.values.shape
    inputs, outputs = (columns, rows) if transposed else (rows, columns)
    return is_small(tokens, heads, inputs, outputs)


def is_small(tokens: int, heads: int, inputs: int, outputs: int) -> bool:
    """Whether the kernels serve this many tokens and heads, and plain matrices of this many inputs and outputs."""
    most = MAX_TOKENS_OF_FEW_HEADS if heads <= FEW_HEADS else MAX_TOKENS
    return 0 < tokens <= most and _is_cut(inputs) and outputs % 128 == 0


def tiling(heads: int, tokens: int) -> tuple[int, int]:
    """Returns the columns of a program for absorbed queries and for values: the fastest on an H200, for 16 heads in
    whole steps, for 128 heads by themselves."""
    if heads <= FEW_HEADS:
        return 64, 16 if tokens < 8 else 32
    return 64 if tokens <= 16 else 128, 32


def absorb_queries_torch(q: Tensor, w_uk: Weight, fp8: StaticFP8 | None = None) -> Tensor:
    q = rounded_inputs(q, w_uk, fp8, transposed=False)
    return torch.bmm(q.transpose(0, 1), w_uk.dense(q.dtype).values).transpose(0, 1)


def expand_values_torch(
    latent: Tensor, w_uv: Weight, out: Tensor, fp8: StaticFP8 | None = None
) -> None:
    latent = rounded_inputs(latent, w_uv, fp8, transposed=True)
    matrix = w_uv.dense(latent.dtype).values
    torch.bmm(latent.transpose(0, 1), matrix.transpose(1, 2), out=out.transpose(0, 1))


def absorb_queries_triton(
    q: Tensor, w_uk: Weight, fp8: StaticFP8 | None = None, *, columns: int | None = None
) -> Tensor:
    """C is a multiple of the columns of a program, D a power of 2, at least 64. A constant weight is read before the wait
    (`pdl.py`). `columns` replaces `tiling`, for benchmarks."""
    tokens, heads, _ = q.shape
    out = q.new_empty(tokens, heads, w_uk.values.shape[2])
    columns = columns or tiling(heads, tokens)[0]
    _launch(absorb_work(q, w_uk, out, columns, transposed=False, fp8=fp8), tokens, heads)
    return out


def expand_values_triton(
    latent: Tensor,
    w_uv: Weight,
    out: Tensor,
    fp8: StaticFP8 | None = None,
    *,
    columns: int | None = None,
) -> None:
    """V is a multiple of the columns of a program, C a power of 2, at least 64. `columns`: see
    `absorb_queries_triton`."""
    tokens, heads, _ = latent.shape
    columns = columns or tiling(heads, tokens)[1]
    _launch(absorb_work(latent, w_uv, out, columns, transposed=True, fp8=fp8), tokens, heads)


def _is_cut(inputs: int) -> bool:
    """Whether the inputs can be cut into four blocks for products."""
    return inputs >= 64 and inputs & (inputs - 1) == 0


def _launch(work: AbsorbWork, tokens: int, heads: int) -> None:
    _absorb_kernel[(work.programs, heads, work.row_blocks(tokens))](
        work, tokens, num_warps=4, **launch_options()
    )


class AbsorbWork(NamedTuple):
    """The arguments of `absorb_program`: out [T, OUTPUTS] = x [T, INPUTS] @ weight for each head. TRANSPOSED: the
    weight has a row for each output. `quantized`: the scales of a quantized weight."""

    x: Tensor
    weight: Tensor
    out: Tensor
    x_stride_t: int
    x_stride_h: int
    weight_stride: int
    out_stride_t: int
    out_stride_h: int
    quantized: QuantizedMatrix
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
    x: Tensor,
    weight: Weight,
    out: Tensor,
    columns: int,
    *,
    transposed: bool,
    fp8: StaticFP8 | None = None,
) -> AbsorbWork:
    """Returns the arguments for any number of tokens. Checks shapes and strides."""
    tokens, heads, inputs = x.shape
    outputs, values = out.shape[2], weight.values
    matrix = (outputs, inputs) if transposed else (inputs, outputs)
    assert values.shape == (heads, *matrix) and out.shape[:2] == (tokens, heads) and tokens, (
        f"x {tuple(x.shape)}, weight {tuple(values.shape)}, out {tuple(out.shape)}"
    )
    assert (
        x.stride(2) == out.stride(2) == values.stride(2) == 1 and values.stride(1) == matrix[1]
    ), f"strides of x {x.stride()}, weight {values.stride()}, out {out.stride()}"
    assert outputs % columns == 0 and _is_cut(inputs), f"{inputs} to {outputs}"
    most = MAX_BLOCK_ROWS
    # Programs that hold all of their weights need many registers: with more rows too few of them fit at a time
    ahead = weight.constant and tokens <= (32 if heads <= FEW_HEADS else 16)
    if weight.is_plain:
        assert fp8 is None, "no kernel for plain weights and FP8 inputs"
        quantized, step = PLAIN, inputs if ahead else inputs // 4
    else:
        if limits(x.device).has_tensor_memory:
            most = MAX_BLOCK_ROWS_WITHOUT_TENSOR_MEMORY
        quantized = quantized_matrix(weight, columns, transposed=transposed, fp8=fp8)
        step = min(inputs, BLOCK_INPUTS)
    return AbsorbWork(
        x,
        values,
        out,
        x.stride(0),
        x.stride(1),
        values.stride(0),
        out.stride(0),
        out.stride(1),
        quantized,
        INPUTS=tl.constexpr(inputs),
        OUTPUTS=tl.constexpr(outputs),
        BLOCK_ROWS=tl.constexpr(min(max(triton.next_power_of_2(tokens), 16), most)),
        BLOCK_OUTPUTS=tl.constexpr(columns),
        BLOCK_INPUTS=tl.constexpr(step),
        TRANSPOSED=tl.constexpr(transposed),
        AHEAD=tl.constexpr(ahead),
    )


@reads_early({"work.AHEAD": ("work.weight", "work.quantized.scales")})
@triton.jit(do_not_specialize=["tokens"])
def _absorb_kernel(work, tokens):
    start_next()
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
    if work.quantized.scales is not None:
        acc = quantized_sums(x_at, is_row, weight, head, column, work)
    elif work.AHEAD:
        w = weight_tile(weight, 0, inputs, column, INPUTS, OUTPUTS, work.TRANSPOSED)
        wait_for_previous()
        values = tl.load(x_at + inputs[None, :], mask=is_row, other=0.0)
        acc = tl.dot(values, w, input_precision="ieee")
    else:
        acc = tl.zeros([work.BLOCK_ROWS, work.BLOCK_OUTPUTS], tl.float32)
        # As many stages as steps: all loads are under way before the first product
        for start in tl.range(0, INPUTS, BLOCK_INPUTS, num_stages=INPUTS // BLOCK_INPUTS + 1):
            values = tl.load(x_at + start + inputs[None, :], mask=is_row, other=0.0)
            w = weight_tile(weight, start, inputs, column, INPUTS, OUTPUTS, work.TRANSPOSED)
            acc = tl.dot(values, w, acc, input_precision="ieee")
    at = work.out + row.to(tl.int64)[:, None] * work.out_stride_t + head * work.out_stride_h
    tl.store(at + column[None, :], acc.to(work.out.dtype.element_ty), mask=is_row)
