"""Tile sizes of the experts' kernels, by device, shape and number of tokens.

They are read from tables (`kernels/tuned.py`). A device or shape without a table has the defaults below, or those of
`quantized_experts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_router.worker.kernels.device import H200, Limits
from mla_router.worker.kernels.tuned import TunedTile, kind_of, moe_tables


@dataclass(frozen=True)
class Tile:
    """The tile of one kernel: outputs and inputs of a weight in one step, blocks of rows that share weights in L2, warps
    of a program, and steps whose loads are under way at once. `skips_padding`: Hopper's kernel of many rows does not
    multiply halves of blocks that are padding."""

    block_n: int
    block_k: int
    group_m: int = 1
    num_warps: int = 4
    num_stages: int = 3
    skips_padding: bool = False


@dataclass(frozen=True)
class MoeTiling:
    """The tiling of both products. `rows` of one expert are in a block. With 1 the pairs are not sorted: each streams
    the weights of its expert (`gemv.py`). group_m is not used then, and num_stages only with quantized weights."""

    rows: int
    gate_up: Tile
    down: Tile


@dataclass(frozen=True)
class MoeShape:
    """E experts, hidden size N, intermediate size I (`width`)."""

    experts: int
    hidden: int
    width: int
    dtype: torch.dtype


def moe_tiling(
    device: str, shape: MoeShape, tokens: int, top_k: int, on: Limits = H200
) -> MoeTiling:
    """Returns the tiling of plain weights."""
    found = tuned_tiling(device, shape.experts, shape.width, kind_of(shape.dtype, (1, 1)), tokens)
    return found or default_tiling(shape, tokens, top_k, on)


def tuned_tiling(device: str, experts: int, width: int, kind: str, tokens: int) -> MoeTiling | None:
    """Returns the tiling of a table, or None. One token has its own tiling, with unsorted pairs, which shared experts
    require."""
    tables = moe_tables(experts, width, device, kind)
    if tables is None:
        return None
    gate_up, down = (table.at(tokens) for table in tables)
    if gate_up is None or down is None or (tokens == 1 and gate_up.block_m != 1):
        return None
    return MoeTiling(gate_up.block_m, _tile(gate_up), _tile(down))


def _tile(tuned: TunedTile) -> Tile:
    return Tile(tuned.block_n, tuned.block_k, tuned.group_m, tuned.num_warps, tuned.num_stages)


def default_tiling(shape: MoeShape, tokens: int, top_k: int, on: Limits = H200) -> MoeTiling:
    """Returns tiles that were among the fastest on an H200 for V2-Lite's experts: in whole steps of 1, 8, 32 and 128 to
    256 requests and of prompts of 384 to 1,024 tokens, otherwise by themselves.

    With few rows an expert blocks are small, since reading weights takes the time. With many rows they occupy the
    tensor cores. Blocks of 128 rows need the tensor memory accelerator: without it the addresses of tiles and the sums
    of a product do not fit into registers.
    """
    if tokens == 1:
        return MoeTiling(rows=1, gate_up=Tile(1, 1024, num_warps=2), down=Tile(2, 512, num_warps=2))
    if tokens == 2:
        return MoeTiling(rows=1, gate_up=Tile(2, 2048, num_warps=8), down=Tile(4, 1024))
    rows_each = tokens * top_k / shape.experts
    if rows_each <= 4:
        return MoeTiling(rows=16, gate_up=Tile(32, 256, 8, 4, 3), down=Tile(128, 128, 2, 4, 3))
    if rows_each <= 24:
        rows = 16 if rows_each <= 12 else 32
        return MoeTiling(rows, gate_up=Tile(64, 128, 8, 4, 3), down=Tile(128, 128, 2, 4, 3))
    if rows_each <= 30:
        return MoeTiling(rows=64, gate_up=Tile(64, 128, 4, 8, 4), down=Tile(128, 128, 2, 4, 4))
    if rows_each <= 56 or not on.has_tensor_memory_accelerator:
        return MoeTiling(rows=64, gate_up=Tile(128, 64, 4, 8, 4), down=Tile(128, 128, 2, 4, 4))
    if rows_each <= 112:
        return MoeTiling(rows=128, gate_up=Tile(128, 64, 4, 8, 4), down=Tile(256, 64, 1, 8, 4))
    return MoeTiling(rows=128, gate_up=Tile(128, 64, 2, 8, 4), down=Tile(256, 64, 2, 8, 4))
