"""Which tile of the experts' matrix products a program computes, and what both products' kernels are given.

Programs that share weights are neighbours in time, as in Triton's matrix multiplication tutorial ("grouped
ordering"). Experts that all tokens go through may come along: their tiles are computed between, or beside, those
of the routed experts, which wait for weights that few rows share, while these keep the tensor cores busy.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.moe.align import Blocks
from mla_router.worker.kernels.moe.tiling import Tile
from mla_router.worker.kernels.pdl import launch_options


@triton.jit
def block_and_column(tile, max_blocks, COLUMNS: tl.constexpr, group_m):
    """Block of rows and block of columns of a tile: down group_m blocks of rows first."""
    in_group = group_m * COLUMNS
    first = tile // in_group * group_m
    size = min(max_blocks - first, group_m)
    return first + tile % in_group % size, tile % in_group // size


@triton.jit
def turn_of(program, every, shared_programs):
    """Of programs of one tile each: whether one works for the shared experts, as the last of each `every` does
    while there is such work, and which of its kind it is."""
    turn = program // every
    is_shared = (program % every == every - 1) & (turn < shared_programs)
    return is_shared, tl.where(is_shared, turn, program - tl.minimum(turn, shared_programs))


@triton.jit
def shared_tile(tile, num_tokens, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """First row and first column of a tile of the shared experts."""
    row_blocks = tl.cdiv(num_tokens, ROWS)
    return tile % row_blocks * ROWS, tile // row_blocks * BLOCK_N


@triton.jit
def share_of(program, routed, shared, COST: tl.constexpr):
    """How many tiles have their turn in each round of programs that take one tile after another, if a shared one
    takes as long as COST routed ones. The first `busy` programs begin with shared tiles, one in so many of them, and
    come to routed ones after `head` rounds; this one has the rounds from `begin` to `end` for those."""
    programs = tl.num_programs(0)
    if COST == 0:  # no shared tiles
        return 0, 0, 0, tl.cdiv(tl.maximum(routed - program, 0), programs)
    rounds = tl.cdiv(routed + shared * COST, programs)
    busy = tl.minimum(tl.cdiv(shared, tl.maximum(rounds // COST, 1)), programs)
    head = tl.cdiv(shared, tl.maximum(busy, 1)) * COST
    free = programs - busy
    early = tl.minimum(routed, head * free)
    own_early = tl.cdiv(tl.maximum(early - (program - busy), 0), tl.maximum(free, 1))
    own_late = tl.cdiv(tl.maximum(routed - early - program, 0), programs)
    begin = tl.where(program < busy, head, 0)
    end = tl.where(own_late > 0, head + own_late, tl.where(program < busy, head, own_early))
    return busy, head, begin, end


@triton.jit
def tile_in(round_, program, busy, head):
    """The routed tile of a program in a round between `begin` and `end` of `share_of`."""
    programs = tl.num_programs(0)
    free = programs - busy
    early = round_ * free + program - busy
    return tl.where(round_ < head, early, head * free + (round_ - head) * programs + program)


def programs_with_turns(
    blocks: Blocks, outputs: int, shared_outputs: int, tile: Tile
) -> tuple[int, tuple[int, int]]:
    """How many programs of one tile each; and for `turn_of`, how many of them work for the shared experts, which one
    of so many: all of them have had their turn among the programs of the fewest blocks that there can be."""
    columns = triton.cdiv(outputs, tile.block_n)
    programs = blocks.max_blocks * columns
    if not shared_outputs:
        return programs, (0, 1)
    shared = triton.cdiv(len(blocks.ids), blocks.rows) * triton.cdiv(shared_outputs, tile.block_n)
    fewest = triton.cdiv(blocks.ids.numel(), blocks.rows) * columns
    return programs + shared, (shared, fewest // shared + 1)


def block_arguments(blocks: Blocks) -> tuple[Tensor | int | None, ...]:
    """Of all kernels over blocks, from `ids` to `num_pairs`."""
    return (
        blocks.ids,
        blocks.pairs,
        blocks.experts,
        blocks.count,
        blocks.max_blocks,
        blocks.ids.numel(),
    )


def tile_constants(blocks: Blocks, tile: Tile) -> dict[str, Any]:
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
