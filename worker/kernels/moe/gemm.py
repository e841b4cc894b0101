"""The experts' matrix products over sorted blocks of rows.

Two launches: gate and up with silu(gate) * up in the epilogue, so that the wide intermediate never
reaches memory; down, which puts the rows back in the order of the pairs (`combine.py` sums them).
Programs that share weights are neighbours in time, as in Triton's matrix multiplication tutorial
("grouped ordering"). Weights, and rows that lie in order, are read by the tensor memory accelerator:
one thread asks for a tile, where each would have asked for its pieces.

Experts that all tokens go through may come along, as programs of the same launches between the others:
while those wait for weights, which few rows share, these keep the tensor cores busy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


@triton.jit
def _turn(program, every, shared_programs):
    """Whether a program works for the shared experts, as the last of each `every` does while there is such
    work, and which of its kind it is."""
    turn = program // every
    is_shared = (program % every == every - 1) & (turn < shared_programs)
    return is_shared, tl.where(is_shared, turn, program - tl.minimum(turn, shared_programs))


@triton.jit
def _inside(real, k, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """What is there of rows [rows] and inputs k [BLOCK_K]."""
    return real[:, None] & (k < SIZE)[None, :] if SIZE % BLOCK_K else real[:, None]


@triton.jit
def _gated(
    rows_at,
    real,
    weight,
    gate_row,
    up_row,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """silu(gate) * up [ROWS, BLOCK_N] float32 of the `real` ones of the rows at `rows_at` [ROWS, BLOCK_K]."""
    k = tl.arange(0, BLOCK_K)
    gate = tl.zeros((ROWS, BLOCK_N), tl.float32)
    up = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        a = tl.load(rows_at + start, _inside(real, start + k, HIDDEN, BLOCK_K), other=0.0)
        gate = tl.dot(a, weight.load([gate_row, start]).T, gate, input_precision="ieee")
        up = tl.dot(a, weight.load([up_row, start]).T, up, input_precision="ieee")
    return gate / (1 + tl.exp(-gate)) * up


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
    """[ROWS, BLOCK_N] float32 of rows and a weight, both read by the tensor memory accelerator."""
    sums = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        a = rows.load([row, start])
        sums = tl.dot(a, weight.load([weight_row, start]).T, sums, input_precision="ieee")
    return sums


@triton.jit(
    do_not_specialize=["max_blocks", "num_pairs", "group_m", "shared_programs", "shared_every"]
)
def _gate_up_gemm(
    x,
    weight,
    out,
    shared,
    shared_out,
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
    """out[row] = silu(gate) * up of x[pair[row] // TOP_K], BLOCK_N of its WIDTH columns; or those of
    shared_out[row] of x[row]."""
    wait_for_previous()
    k = tl.arange(0, BLOCK_K)
    n = tl.arange(0, BLOCK_N)
    program = tl.program_id(0)
    if shared is not None:
        is_shared, program = _turn(program, shared_every, shared_programs)
        if is_shared:
            row_blocks = tl.cdiv(num_pairs // TOP_K, ROWS)
            token = (program % row_blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
            real = token < num_pairs // TOP_K
            first = program // row_blocks * BLOCK_N
            x_at = x + tl.where(real, token, 0)[:, None] * HIDDEN + k[None, :]
            gated = _gated(
                x_at,
                real,
                shared,
                first,
                SHARED_WIDTH + first,
                HIDDEN,
                ROWS,
                BLOCK_N,
                BLOCK_K,
            )
            at = shared_out + token[:, None] * SHARED_WIDTH + (first + n)[None, :]
            inside = real[:, None] & (first + n < SHARED_WIDTH)[None, :]
            tl.store(at, gated.to(out.dtype.element_ty), inside)
            return

    COLUMNS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    block, column = _block_and_column(program, max_blocks, COLUMNS, group_m)
    expert, pair, rows, exists = block_rows(
        block, ids, pairs, experts, block_count, max_blocks, num_pairs, TOP_K, BLOCK_TOP_K, ROWS
    )
    if not exists:
        return
    real = pair < num_pairs
    # Columns past the end read others' weights, or zeros, and are not stored
    first = column * BLOCK_N
    gate_row = (expert * (2 * WIDTH)).to(tl.int32) + first
    x_at = x + tl.where(real, pair // TOP_K, 0).to(tl.int64)[:, None] * HIDDEN + k[None, :]
    gated = _gated(x_at, real, weight, gate_row, gate_row + WIDTH, HIDDEN, ROWS, BLOCK_N, BLOCK_K)
    at = out + rows[:, None] * WIDTH + (first + n)[None, :]
    tl.store(at, gated.to(out.dtype.element_ty), real[:, None] & (first + n < WIDTH)[None, :])


@triton.jit(
    do_not_specialize=["max_blocks", "num_pairs", "group_m", "shared_programs", "shared_every"]
)
def _down_gemm(
    gated,
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
    """out[pair[row]] = down(gated[row]), BLOCK_N of its HIDDEN columns; or those of out[num_pairs + row] of
    shared_gated[row]."""
    wait_for_previous()
    n = tl.arange(0, BLOCK_N)
    program = tl.program_id(0)
    if shared is not None:
        is_shared, program = _turn(program, shared_every, shared_programs)
        if is_shared:
            row_blocks = tl.cdiv(num_pairs // TOP_K, ROWS)
            row = program % row_blocks * ROWS
            first = program // row_blocks * BLOCK_N
            sums = _product(shared_gated, row, shared, first, SHARED_WIDTH, ROWS, BLOCK_N, BLOCK_K)
            token = (row + tl.arange(0, ROWS)).to(tl.int64)
            inside = (token < num_pairs // TOP_K)[:, None] & (first + n < HIDDEN)[None, :]
            at = out + (num_pairs + token)[:, None] * HIDDEN + (first + n)[None, :]
            tl.store(at, sums.to(out.dtype.element_ty), inside)
            return

    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    block, column = _block_and_column(program, max_blocks, COLUMNS, group_m)
    expert, pair, rows, exists = block_rows(
        block, ids, pairs, experts, block_count, max_blocks, num_pairs, TOP_K, BLOCK_TOP_K, ROWS
    )
    if not exists:
        return
    real = pair < num_pairs
    first = column * BLOCK_N
    weight_row = (expert * HIDDEN).to(tl.int32) + first
    if pairs is None:
        k = tl.arange(0, BLOCK_K)
        sums = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            inside = _inside(real, start + k, WIDTH, BLOCK_K)
            a = tl.load(gated + rows[:, None] * WIDTH + (start + k)[None, :], inside, other=0.0)
            sums = tl.dot(a, weight.load([weight_row, start]).T, sums, input_precision="ieee")
    else:
        # Padding is read like the rest, and its products are not stored
        sums = _product(gated, block * ROWS, weight, weight_row, WIDTH, ROWS, BLOCK_N, BLOCK_K)
    at = out + pair.to(tl.int64)[:, None] * HIDDEN + (first + n)[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), real[:, None] & (first + n < HIDDEN)[None, :])


class Gated(NamedTuple):
    """silu(gate) * up: of the rows of `blocks` [blocks.intermediate_rows, I], of which padding is not written;
    and of all tokens by shared experts [T, S]."""

    rows: Tensor
    shared: Tensor | None = None


def gate_up_blocks(
    x: Tensor, gate_up: Tensor, blocks: Blocks, tile: Tile, shared: Tensor | None = None
) -> Gated:
    """In x's dtype. x [T, N] contiguous, gate_up [E, 2I, N], shared [2S, N], of which rows are whole pieces of 16
    bytes; so are those of the other weights."""
    _, double, hidden = gate_up.shape
    shared_width = 0 if shared is None else len(shared) // 2
    out = x.new_empty(blocks.intermediate_rows, double // 2)
    shared_out = None if shared is None else x.new_empty(len(x), shared_width)
    programs, turns = _programs(blocks, double // 2, shared_width, tile)
    _gate_up_gemm[(programs,)](
        x,
        _tiles(gate_up.flatten(0, 1), tile),
        out,
        None if shared is None else _tiles(shared, tile),
        shared_out,
        *_block_arguments(blocks),
        tile.group_m,
        *turns,
        HIDDEN=hidden,
        WIDTH=double // 2,
        SHARED_WIDTH=shared_width,
        **_constants(blocks, tile),
    )
    return Gated(out, shared_out)


def down_blocks(
    gated: Gated, down: Tensor, blocks: Blocks, tile: Tile, shared: Tensor | None = None
) -> Tensor:
    """[P, N] in gated's dtype, by pair; with `shared` [N, S], of sorted pairs, then the T rows of the shared
    experts. down [E, N, I]."""
    _, hidden, width = down.shape
    assert (gated.shared is None) == (shared is None), f"{gated.shared=}, {shared=}"
    assert blocks.pairs is not None or shared is None, f"shared experts with {blocks}"
    tokens = 0 if shared is None else len(blocks.ids)
    out = gated.rows.new_empty(blocks.ids.numel() + tokens, hidden)
    programs, turns = _programs(blocks, hidden, 0 if shared is None else hidden, tile)
    _down_gemm[(programs,)](
        gated.rows if blocks.pairs is None else _rows(gated.rows, blocks, tile),
        _tiles(down.flatten(0, 1), tile),
        out,
        None if gated.shared is None else _rows(gated.shared, blocks, tile),
        None if shared is None else _tiles(shared, tile),
        *_block_arguments(blocks),
        tile.group_m,
        *turns,
        HIDDEN=hidden,
        WIDTH=width,
        SHARED_WIDTH=0 if shared is None else shared.shape[1],
        **_constants(blocks, tile),
    )
    return out


def _programs(
    blocks: Blocks, outputs: int, shared_outputs: int, tile: Tile
) -> tuple[int, tuple[int, int]]:
    """How many there are; and for `_turn`, how many of them work for the shared experts, which one of so many:
    all of them have had their turn among the programs of the fewest blocks that there can be."""
    columns = triton.cdiv(outputs, tile.block_n)
    programs = blocks.max_blocks * columns
    if not shared_outputs:
        return programs, (0, 1)
    shared = triton.cdiv(len(blocks.ids), blocks.rows) * triton.cdiv(shared_outputs, tile.block_n)
    fewest = triton.cdiv(blocks.ids.numel(), blocks.rows) * columns
    return programs + shared, (shared, fewest // shared + 1)


def _tiles(weight: Tensor, tile: Tile) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k])


def _rows(rows: Tensor, blocks: Blocks, tile: Tile) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, [blocks.rows, tile.block_k])


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
