"""The experts' matrix products over sorted blocks of rows, and the weighted sum of their results.

Three launches: gate and up with silu(gate) * up in the epilogue, so that the wide intermediate never
reaches memory; down, which puts the rows back in the order of the pairs; the sum over a token's
experts in the order of k, in float32. Programs that share weights are neighbours in time, as in
Triton's matrix multiplication tutorial ("grouped ordering"). Weights, and rows that lie in order, are read by
the tensor memory accelerator: one thread asks for a tile, where each would have asked for its pieces.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_router.worker.kernels.moe.align import Blocks, block_rows
from mla_router.worker.kernels.moe.tiling import Tile
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous


@triton.jit
def _block_and_column(program, max_blocks, COLUMNS: tl.constexpr, group_m):
    """Block of rows and block of columns of a program: down group_m blocks of rows first."""
    in_group = group_m * COLUMNS
    first = program // in_group * group_m
    size = min(max_blocks - first, group_m)
    return first + program % in_group % size, program % in_group // size


@triton.jit(do_not_specialize=["max_blocks", "num_pairs", "group_m"])
def _gate_up_gemm(
    x,
    weight,
    out,
    ids,
    pairs,
    experts,
    block_count,
    max_blocks,
    num_pairs,
    group_m,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[row] = silu(gate) * up of x[pair[row] // TOP_K], BLOCK_N of its WIDTH columns."""
    wait_for_previous()
    COLUMNS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    block, column = _block_and_column(tl.program_id(0), max_blocks, COLUMNS, group_m)
    expert, pair, rows, exists = block_rows(
        block, ids, pairs, experts, block_count, max_blocks, num_pairs, TOP_K, BLOCK_TOP_K, ROWS
    )
    if not exists:
        return
    real = pair < num_pairs

    # Columns past the end read others' weights, or zeros, and are not stored
    k = tl.arange(0, BLOCK_K)
    x_at = x + tl.where(real, pair // TOP_K, 0).to(tl.int64)[:, None] * HIDDEN + k[None, :]
    first = (expert * (2 * WIDTH)).to(tl.int32) + column * BLOCK_N
    gate = tl.zeros((ROWS, BLOCK_N), tl.float32)
    up = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        a = tl.load(x_at + start, _inside(real, start + k, HIDDEN, BLOCK_K), other=0.0)
        gate = tl.dot(a, weight.load([first, start]).T, gate, input_precision="ieee")
        up = tl.dot(a, weight.load([first + WIDTH, start]).T, up, input_precision="ieee")
    gated = (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out + rows[:, None] * WIDTH + n[None, :], gated, real[:, None] & (n < WIDTH)[None, :])


@triton.jit(do_not_specialize=["max_blocks", "num_pairs", "group_m"])
def _down_gemm(
    gated,
    weight,
    out,
    ids,
    pairs,
    experts,
    block_count,
    max_blocks,
    num_pairs,
    group_m,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[pair[row]] = down(gated[row]), BLOCK_N of its HIDDEN columns."""
    wait_for_previous()
    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    block, column = _block_and_column(tl.program_id(0), max_blocks, COLUMNS, group_m)
    expert, pair, rows, exists = block_rows(
        block, ids, pairs, experts, block_count, max_blocks, num_pairs, TOP_K, BLOCK_TOP_K, ROWS
    )
    if not exists:
        return

    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real = pair < num_pairs
    first = (expert * HIDDEN).to(tl.int32) + column * BLOCK_N
    sums = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        if pairs is None:
            inside = _inside(real, start + k, WIDTH, BLOCK_K)
            a = tl.load(gated + rows[:, None] * WIDTH + (start + k)[None, :], inside, other=0.0)
        else:
            # Padding is read like the rest, and its products are not stored
            a = gated.load([block * ROWS, start])
        sums = tl.dot(a, weight.load([first, start]).T, sums, input_precision="ieee")
    tl.store(
        out + pair.to(tl.int64)[:, None] * HIDDEN + n[None, :],
        sums.to(out.dtype.element_ty),
        real[:, None] & (n < HIDDEN)[None, :],
    )


@triton.jit
def _inside(real, k, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """What is there of rows [rows] and inputs k [BLOCK_K]."""
    return real[:, None] & (k < SIZE)[None, :] if SIZE % BLOCK_K else real[:, None]


@triton.jit
def _combine(
    rows,
    weights,
    plus,
    out,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < HIDDEN
    total = tl.zeros((BLOCK_N,), tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        row = tl.load(rows + pair * HIDDEN + n, inside, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * row
    if plus is not None:
        total += tl.load(plus + token * HIDDEN + n, inside, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + n, total.to(out.dtype.element_ty), inside)


def gate_up_blocks(x: Tensor, gate_up: Tensor, blocks: Blocks, tile: Tile) -> Tensor:
    """[blocks.intermediate_rows, I] in x's dtype, silu(gate) * up of the token of each row of `blocks`;
    rows that are padding are not written.

    x [T, N] contiguous, gate_up [E, 2I, N].
    """
    _, double, hidden = gate_up.shape
    out = x.new_empty(blocks.intermediate_rows, double // 2)
    programs = blocks.max_blocks * triton.cdiv(double // 2, tile.block_n)
    _gate_up_gemm[(programs,)](
        x,
        TensorDescriptor.from_tensor(gate_up.flatten(0, 1), [tile.block_n, tile.block_k]),
        out,
        *_block_arguments(blocks),
        tile.group_m,
        HIDDEN=hidden,
        WIDTH=double // 2,
        **_constants(blocks, tile),
    )
    return out


def down_blocks(gated: Tensor, down: Tensor, blocks: Blocks, tile: Tile) -> Tensor:
    """[P, N] in gated's dtype, by pair. gated [blocks.intermediate_rows, I] contiguous, down [E, N, I]."""
    _, hidden, width = down.shape
    out = gated.new_empty(blocks.ids.numel(), hidden)
    programs = blocks.max_blocks * triton.cdiv(hidden, tile.block_n)
    in_order = blocks.pairs is not None
    _down_gemm[(programs,)](
        TensorDescriptor.from_tensor(gated, [blocks.rows, tile.block_k]) if in_order else gated,
        TensorDescriptor.from_tensor(down.flatten(0, 1), [tile.block_n, tile.block_k]),
        out,
        *_block_arguments(blocks),
        tile.group_m,
        HIDDEN=hidden,
        WIDTH=width,
        **_constants(blocks, tile),
    )
    return out


def combine(rows: Tensor, weights: Tensor, plus: Tensor | None = None) -> Tensor:
    """[T, N]: sum over k, in its order and in float32, of weights[t, k] * rows[t * K + k]; and `plus`
    [T, N], contiguous."""
    tokens, top_k = weights.shape
    hidden = rows.shape[1]
    out = rows.new_empty(tokens, hidden)
    _combine[(tokens, triton.cdiv(hidden, 512))](
        rows,
        weights,
        plus,
        out,
        TOP_K=top_k,
        HIDDEN=hidden,
        BLOCK_N=512,
        num_warps=2,
        **launch_options(),
    )
    return out


def _block_arguments(blocks: Blocks) -> tuple[Tensor | int | None, ...]:
    """Of both kernels, from `ids` to `num_pairs`."""
    return (
        blocks.ids,
        blocks.pairs,
        blocks.experts,
        blocks.count,
        blocks.max_blocks,
        blocks.ids.numel(),
    )


def _constants(blocks: Blocks, tile: Tile) -> dict[str, Any]:
    top_k = blocks.ids.shape[1]
    return {
        "TOP_K": top_k,
        "BLOCK_TOP_K": triton.next_power_of_2(top_k),
        "ROWS": blocks.rows,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **launch_options(),
    }
