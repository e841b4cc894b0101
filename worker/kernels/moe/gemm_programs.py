"""The map from programs to tiles in the experts' matrix products, and the arguments that both kernels share.

Programs that share weights run at the same time, as in Triton's matrix multiplication tutorial ("grouped
ordering"). Tiles of shared experts can be computed between tiles of routed experts: the latter wait
for weights that few rows use, while tiles of shared experts occupy the tensor cores.
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
    """Returns the block of rows and the block of columns of a tile: group_m blocks of rows come first."""
    in_group = group_m * COLUMNS
    first = tile // in_group * group_m
    size = min(max_blocks - first, group_m)
    return first + tile % in_group % size, tile % in_group // size


@triton.jit
def turn_of(program, every, shared_programs):
    """Returns whether a program of one tile has one of the shared experts, and its index among the programs of its kind.
    The last of each `every` programs has, as long as there are such tiles."""
    turn = program // every
    is_shared = (program % every == every - 1) & (turn < shared_programs)
    return is_shared, tl.where(is_shared, turn, program - tl.minimum(turn, shared_programs))


@triton.jit
def shared_tile(tile, num_tokens, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the first row and the first column of a tile of the shared experts."""
    row_blocks = tl.cdiv(num_tokens, ROWS)
    return tile % row_blocks * ROWS, tile // row_blocks * BLOCK_N


@triton.jit
def share_of(program, routed, shared, COST: tl.constexpr):
    """Divides tiles among programs that take tile after tile in rounds, if a shared tile takes as long as COST routed
    tiles. The first `busy` programs begin with shared tiles and take routed tiles after `head` rounds. This program has
    the rounds from `begin` to `end` for routed tiles."""
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
    """Returns the routed tile of a program in a round from `begin` to `end` of `share_of`."""
    programs = tl.num_programs(0)
    free = programs - busy
    early = round_ * free + program - busy
    return tl.where(round_ < head, early, head * free + (round_ - head) * programs + program)


def programs_with_turns(
    blocks: Blocks, outputs: int, shared_outputs: int, tile: Tile
) -> tuple[int, tuple[int, int]]:
    """Returns the number of programs of one tile, and for `turn_of` the number of tiles of the shared experts and their
    interval among the programs. With the fewest possible blocks all of them still run."""
    columns = triton.cdiv(outputs, tile.block_n)
    programs = blocks.max_blocks * columns
    if not shared_outputs:
        return programs, (0, 1)
    shared = triton.cdiv(len(blocks.ids), blocks.rows) * triton.cdiv(shared_outputs, tile.block_n)
    fewest = triton.cdiv(blocks.ids.numel(), blocks.rows) * columns
    return programs + shared, (shared, fewest // shared + 1)


def block_arguments(blocks: Blocks) -> tuple[Tensor | int | None, ...]:
    """Returns the arguments of a kernel over blocks from `ids` to `num_pairs`."""
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
