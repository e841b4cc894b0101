"""The experts' second matrix product over sorted blocks of rows. It writes rows in the order of the pairs, and
`combine.py` sums them.

Few rows have a program for each tile: a free multiprocessor takes the next one, since weights do not arrive at the
same speed for all. For many rows as many programs as run at a time take tile after tile, and load the first inputs of
the next tile while they write results.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.moe.align import Blocks, block_rows
from mla_router.worker.kernels.moe.gate_up_gemm import Gated
from mla_router.worker.kernels.moe.gemm_programs import (
    block_and_column,
    block_arguments,
    programs_with_turns,
    share_of,
    shared_tile,
    tile_constants,
    tile_in,
    turn_of,
)
from mla_router.worker.kernels.moe.tiling import Tile
from mla_router.worker.kernels.pdl import wait_for_previous

# Rows of a block from which programs take tile after tile: on an H200 whole prompts in blocks of 64 rows are slower with
# it, in blocks of 128 rows faster.
MANY_ROWS = 128


@triton.jit
def _product(
    rows,
    row,
    weight,
    weight_row,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns the product [ROWS, BLOCK_N] float32 of rows and a weight, both read by the tensor memory accelerator."""
    sums = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        a = rows.load([row, start])
        sums = tl.dot(a, weight.load([weight_row, start]).T, sums, input_precision="ieee")
    return sums


@triton.jit
def _store(out, row, inside, first, sums, HIDDEN: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes sums [ROWS, BLOCK_N] to rows `row` [ROWS], from column `first` on."""
    column = first + tl.arange(0, BLOCK_N)
    at = out + row.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), inside[:, None] & (column < HIDDEN)[None, :])


@triton.jit(
    do_not_specialize=["max_blocks", "num_pairs", "group_m", "shared_programs", "shared_every"]
)
def _down_gemm(
    gated,
    rows_of_gated,
    weight,
    out,
    shared_gated,
    shared,
    ids,
    pairs,
    experts,
    block_count,
    max_blocks,
    num_pairs,
    group_m,
    shared_programs,
    shared_every,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes BLOCK_N of HIDDEN columns of out[pair[row]] = down(gated[row]), or of out[num_pairs + row] from
    shared_gated[row]."""
    wait_for_previous()
    program = tl.program_id(0)
    if shared is not None:
        is_shared, program = turn_of(program, shared_every, shared_programs)
        if is_shared:
            tokens = num_pairs // TOP_K
            row, first = shared_tile(program, tokens, ROWS, BLOCK_N)
            sums = _product(shared_gated, row, shared, first, SHARED_WIDTH, ROWS, BLOCK_N, BLOCK_K)
            token = row + tl.arange(0, ROWS)
            _store(out, num_pairs + token, token < tokens, first, sums, HIDDEN, BLOCK_N)
            return

    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    block, column = block_and_column(program, max_blocks, COLUMNS, group_m)
    expert, pair, rows, exists = block_rows(
        block, ids, pairs, experts, block_count, max_blocks, num_pairs, TOP_K, BLOCK_TOP_K, ROWS
    )
    if not exists:
        return
    real = pair < num_pairs
    # Columns past the end are weights of another expert, or zeros, and are not stored
    first = column * BLOCK_N
    weight_row = (expert * HIDDEN).to(tl.int32) + first
    if pairs is None:
        k = tl.arange(0, BLOCK_K)
        sums = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            inside = real[:, None]
            if WIDTH % BLOCK_K:
                inside &= (start + k < WIDTH)[None, :]
            a = tl.load(gated + rows[:, None] * WIDTH + (start + k)[None, :], inside, other=0.0)
            sums = tl.dot(a, weight.load([weight_row, start]).T, sums, input_precision="ieee")
    else:
        # Padding is multiplied as well, and not stored
        sums = _product(
            rows_of_gated, block * ROWS, weight, weight_row, WIDTH, ROWS, BLOCK_N, BLOCK_K
        )
    _store(out, pair, real, first, sums, HIDDEN, BLOCK_N)


@triton.jit(do_not_specialize=["num_pairs", "group_m", "shared_tiles"])
def _down_gemm_in_rounds(
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
    """`_down_gemm` of sorted pairs, where a program takes tile after tile."""
    wait_for_previous()
    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    COST: tl.constexpr = (SHARED_WIDTH + WIDTH - 1) // WIDTH
    program = tl.program_id(0)
    blocks = tl.load(block_count)
    busy, head, begin, end = share_of(program, blocks * COLUMNS, shared_tiles, COST)
    if shared is not None:
        tokens = num_pairs // TOP_K
        first_tile = tl.where(program < busy, program, shared_tiles)
        for tile in tl.range(first_tile, shared_tiles, tl.maximum(busy, 1), flatten=True):
            row, first = shared_tile(tile, tokens, ROWS, BLOCK_N)
            sums = _product(shared_gated, row, shared, first, SHARED_WIDTH, ROWS, BLOCK_N, BLOCK_K)
            token = row + tl.arange(0, ROWS)
            _store(out, num_pairs + token, token < tokens, first, sums, HIDDEN, BLOCK_N)

    for round_ in tl.range(begin, end, flatten=True):
        tile = tile_in(round_, program, busy, head)
        block, column = block_and_column(tile, blocks, COLUMNS, group_m)
        first = column * BLOCK_N
        weight_row = tl.load(experts + block) * HIDDEN + first
        sums = _product(gated, block * ROWS, weight, weight_row, WIDTH, ROWS, BLOCK_N, BLOCK_K)
        pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS))
        _store(out, pair, pair < num_pairs, first, sums, HIDDEN, BLOCK_N)


def down_blocks(
    gated: Gated, down: Tensor, blocks: Blocks, tile: Tile, shared: Tensor | None = None
) -> Tensor:
    """Returns rows [P, N] in gated's dtype, in the order of the pairs; with `shared` [N, S], for sorted pairs alone,
    the T rows of the shared experts follow. down [E, N, I]. Rows of weights are multiples of 16 bytes."""
    _, hidden, width = down.shape
    assert (gated.shared is None) == (shared is None), f"{gated.shared=}, {shared=}"
    assert blocks.pairs is not None or shared is None, f"shared experts with {blocks}"
    tokens = 0 if shared is None else len(blocks.ids)
    out = gated.rows.new_empty(blocks.ids.numel() + tokens, hidden)
    weight = _tiles(down.flatten(0, 1), tile)
    rows = None if blocks.pairs is None else _rows(gated.rows, blocks, tile)
    shared_rows = None if gated.shared is None else _rows(gated.shared, blocks, tile)
    shared_weight = None if shared is None else _tiles(shared, tile)
    constants = tile_constants(blocks, tile) | {
        "HIDDEN": hidden,
        "WIDTH": width,
        "SHARED_WIDTH": 0 if shared is None else shared.shape[1],
    }
    if rows is None or blocks.rows < MANY_ROWS:
        programs, turns = programs_with_turns(blocks, hidden, hidden if tokens else 0, tile)
        _down_gemm[(programs,)](
            gated.rows,
            rows,
            weight,
            out,
            shared_rows,
            shared_weight,
            *block_arguments(blocks),
            tile.group_m,
            *turns,
            **constants,
        )
        return out
    del constants["BLOCK_TOP_K"]  # for unsorted pairs alone
    columns = triton.cdiv(hidden, tile.block_n)
    shared_tiles = triton.cdiv(tokens, blocks.rows) * columns
    most = blocks.max_blocks * columns + shared_tiles
    # One program fills a multiprocessor
    _down_gemm_in_rounds[(min(limits(down.device).multiprocessors, most),)](
        rows,
        weight,
        out,
        shared_rows,
        shared_weight,
        blocks.pairs,
        blocks.experts,
        blocks.count,
        blocks.ids.numel(),
        tile.group_m,
        shared_tiles,
        **constants,
    )
    return out


def _tiles(weight: Tensor, tile: Tile) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k])


def _rows(rows: Tensor, blocks: Blocks, tile: Tile) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, [blocks.rows, tile.block_k])
