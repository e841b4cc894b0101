"""The experts' second matrix product over sorted blocks of rows, which puts the rows back in the order of the
pairs (`combine.py` sums them).

Few rows: a program for each tile. Many: as many programs as run at a time, each of which takes one tile after
another and reads the next one's first inputs while it writes the last one's results.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_router.worker.kernels.moe.align import Blocks, block_rows
from mla_router.worker.kernels.moe.gate_up_gemm import Gated
from mla_router.worker.kernels.moe.gemm_programs import (
    block_and_column,
    block_arguments,
    programs_at_a_time,
    share_of,
    tile_constants,
    tile_in,
)
from mla_router.worker.kernels.moe.tiling import Tile
from mla_router.worker.kernels.pdl import wait_for_previous

# Rows of blocks whose tiles keep a multiprocessor busy by themselves
MANY_ROWS = 64


@triton.jit(do_not_specialize=["max_blocks", "num_pairs", "group_m"])
def _down_gemm(
    gated,
    rows_of_gated,
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
    k = tl.arange(0, BLOCK_K)
    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    block, column = block_and_column(tl.program_id(0), max_blocks, COLUMNS, group_m)
    expert, pair, rows, exists = block_rows(
        block, ids, pairs, experts, block_count, max_blocks, num_pairs, TOP_K, BLOCK_TOP_K, ROWS
    )
    if not exists:
        return
    real = pair < num_pairs
    # Columns past the end are others' weights, or zeros, and are not stored
    first = column * BLOCK_N
    weight_row = (expert * HIDDEN).to(tl.int32) + first
    sums = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        if pairs is None:
            inside = real[:, None]
            if WIDTH % BLOCK_K:
                inside &= (start + k < WIDTH)[None, :]
            a = tl.load(gated + rows[:, None] * WIDTH + (start + k)[None, :], inside, other=0.0)
        else:
            # Padding is read like the rest, and its products are not stored
            a = rows_of_gated.load([block * ROWS, start])
        sums = tl.dot(a, weight.load([weight_row, start]).T, sums, input_precision="ieee")
    n = first + tl.arange(0, BLOCK_N)
    at = out + pair.to(tl.int64)[:, None] * HIDDEN + n[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), real[:, None] & (n < HIDDEN)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "group_m", "shared_tiles"])
def _down_gemm_in_turns(
    gated,
    weight,
    out,
    shared_gated,
    shared,
    pairs,
    experts,
    block_count,
    num_pairs,
    group_m,
    shared_tiles,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The same, and out[num_pairs + row] of shared_gated[row]."""
    wait_for_previous()
    r = tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)
    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    COST: tl.constexpr = (SHARED_WIDTH + WIDTH - 1) // WIDTH
    program = tl.program_id(0)
    blocks = tl.load(block_count)
    busy, head, begin, end = share_of(program, blocks * COLUMNS, shared_tiles, COST)
    if shared is not None:
        tokens = num_pairs // TOP_K
        row_blocks = tl.cdiv(tokens, ROWS)
        own = tl.where(program < busy, program, shared_tiles)
        for tile in tl.range(own, shared_tiles, tl.maximum(busy, 1), flatten=True):
            row = tile % row_blocks * ROWS
            first = tile // row_blocks * BLOCK_N
            sums = tl.zeros((ROWS, BLOCK_N), tl.float32)
            for start in range(0, SHARED_WIDTH, BLOCK_K):
                a = shared_gated.load([row, start])
                b = shared.load([first, start])
                sums = tl.dot(a, b.T, sums, input_precision="ieee")
            token = (row + r).to(tl.int64)
            inside = (token < tokens)[:, None] & (first + n < HIDDEN)[None, :]
            at = out + (num_pairs + token)[:, None] * HIDDEN + (first + n)[None, :]
            tl.store(at, sums.to(out.dtype.element_ty), inside)

    for round_ in tl.range(begin, end, flatten=True):
        tile = tile_in(round_, program, busy, head)
        block, column = block_and_column(tile, blocks, COLUMNS, group_m)
        first = column * BLOCK_N
        weight_row = tl.load(experts + block) * HIDDEN + first
        sums = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            a = gated.load([block * ROWS, start])
            sums = tl.dot(a, weight.load([weight_row, start]).T, sums, input_precision="ieee")
        pair = tl.load(pairs + block * ROWS + r)
        inside = (pair < num_pairs)[:, None] & (first + n < HIDDEN)[None, :]
        at = out + pair.to(tl.int64)[:, None] * HIDDEN + (first + n)[None, :]
        tl.store(at, sums.to(out.dtype.element_ty), inside)


def down_blocks(
    gated: Gated, down: Tensor, blocks: Blocks, tile: Tile, shared: Tensor | None = None
) -> Tensor:
    """[P, N] in gated's dtype, by pair; with `shared` [N, S], of sorted pairs, then the T rows of the shared
    experts. down [E, N, I]. Rows of weights are whole pieces of 16 bytes."""
    _, hidden, width = down.shape
    assert (gated.shared is None) == (shared is None), f"{gated.shared=}, {shared=}"
    assert blocks.pairs is not None or shared is None, f"shared experts with {blocks}"
    tokens = 0 if shared is None else len(blocks.ids)
    out = gated.rows.new_empty(blocks.ids.numel() + tokens, hidden)
    weight = _tiles(down.flatten(0, 1), tile)
    rows = None if blocks.pairs is None else _rows(gated.rows, blocks, tile)
    constants = tile_constants(blocks, tile)
    columns = triton.cdiv(hidden, tile.block_n)
    if rows is None or (blocks.rows < MANY_ROWS and shared is None):
        _down_gemm[(blocks.max_blocks * columns,)](
            gated.rows,
            rows,
            weight,
            out,
            *block_arguments(blocks),
            tile.group_m,
            HIDDEN=hidden,
            WIDTH=width,
            **constants,
        )
        return out
    del constants["BLOCK_TOP_K"]
    shared_tiles = triton.cdiv(tokens, blocks.rows) * columns
    most = blocks.max_blocks * columns + shared_tiles
    _down_gemm_in_turns[(min(programs_at_a_time(down.device), most),)](
        rows,
        weight,
        out,
        None if gated.shared is None else _rows(gated.shared, blocks, tile),
        None if shared is None else _tiles(shared, tile),
        blocks.pairs,
        blocks.experts,
        blocks.count,
        blocks.ids.numel(),
        tile.group_m,
        shared_tiles,
        HIDDEN=hidden,
        WIDTH=width,
        SHARED_WIDTH=0 if shared is None else shared.shape[1],
        **constants,
    )
    return out


def _tiles(weight: Tensor, tile: Tile) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k])


def _rows(rows: Tensor, blocks: Blocks, tile: Tile) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, [blocks.rows, tile.block_k])
