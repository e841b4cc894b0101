"""The experts' matrix products over sorted blocks of rows, and the weighted sum of their results.

Three launches: gate and up with silu(gate) * up in the epilogue, so that the wide intermediate never
reaches memory; down, which puts the rows back in the order of the pairs; the sum over a token's
experts in the order of k, in float32. Programs that share weights are neighbours in time, as in
Triton's matrix multiplication tutorial ("grouped ordering").
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

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


@triton.jit
def _product(rows_at, is_row, weight_at, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows times a weight, over SIZE inputs, of which the pointers `rows_at` [rows, BLOCK_K] and `weight_at`
    [BLOCK_K, columns] have the first; [rows, columns] float32. Where `is_row` [rows, 1] is not: 0."""
    k = tl.arange(0, BLOCK_K)
    sums = tl.zeros((rows_at.shape[0], weight_at.shape[1]), tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        if SIZE % BLOCK_K == 0:
            a = tl.load(rows_at, is_row, other=0.0)
            b = tl.load(weight_at)
        else:
            a = tl.load(rows_at, is_row & (start + k < SIZE)[None, :], other=0.0)
            b = tl.load(weight_at, (start + k < SIZE)[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        rows_at += BLOCK_K
        weight_at += BLOCK_K
    return sums


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

    # Rows of gate and up alternate, so that both of a pair of outputs lie in one thread. Columns past
    # the end read others' weights and are not stored.
    lane = tl.arange(0, 2 * BLOCK_N)
    weight_row = lane % 2 * WIDTH + (column * BLOCK_N + lane // 2) % WIDTH
    k = tl.arange(0, BLOCK_K)
    x_at = x + tl.where(real, pair // TOP_K, 0).to(tl.int64)[:, None] * HIDDEN + k[None, :]
    weight_at = weight + expert * (2 * WIDTH * HIDDEN) + weight_row[None, :] * HIDDEN + k[:, None]
    sums = _product(x_at, real[:, None], weight_at, HIDDEN, BLOCK_K)
    gate, up = tl.split(tl.reshape(sums, (ROWS, BLOCK_N, 2)))
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
    gated_at = gated + rows[:, None] * WIDTH + k[None, :]
    weight_at = weight + expert * (HIDDEN * WIDTH) + (n % HIDDEN)[None, :] * WIDTH + k[:, None]
    # Padding is read like the rest, and its products are not stored
    sums = _product(gated_at, tl.full((ROWS, 1), True, tl.int1), weight_at, WIDTH, BLOCK_K)
    tl.store(
        out + pair.to(tl.int64)[:, None] * HIDDEN + n[None, :],
        sums.to(out.dtype.element_ty),
        (pair < num_pairs)[:, None] & (n < HIDDEN)[None, :],
    )


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
        gate_up,
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
    _down_gemm[(programs,)](
        gated,
        down,
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
