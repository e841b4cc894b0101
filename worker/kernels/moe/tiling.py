"""Sizes of the tiles of the experts' kernels, by device, shape and number of tokens.

They are read from `tables/`, which `bench/kernels/tune_moe.py` writes on the device itself. A device
or shape without a table has the defaults below.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import torch

from mla_router.worker.kernels.device import H200, Limits

TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Tile:
    """Of one kernel: outputs and inputs of a weight that a step reads, blocks of rows that share the
    weights in L2, warps of a program, and steps whose loads are under way at once."""

    block_n: int
    block_k: int
    group_m: int = 1
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class MoeTiling:
    """`rows` of one expert in a block; 1 means that the pairs are not sorted, each streams the weights
    of its expert for itself (`gemv.py`), and group_m and num_stages are not used."""

    rows: int
    gate_up: Tile
    down: Tile


@dataclass(frozen=True)
class MoeShape:
    """E experts, hidden size N, width I."""

    experts: int
    hidden: int
    width: int
    dtype: torch.dtype


def moe_tiling(
    device: str, shape: MoeShape, tokens: int, top_k: int, on: Limits = H200
) -> MoeTiling:
    """The tiling of the next tuned number of tokens, of the last one beyond them; of one token no other's, since
    shared experts go along only with pairs that are not sorted."""
    table = read_table(table_path(device, shape))
    if table is None or (tokens == 1 and 1 not in table):
        return default_tiling(shape, tokens, top_k, on)
    tuned = sorted(table)
    return table[tuned[min(bisect_left(tuned, tokens), len(tuned) - 1)]]


def table_path(device: str, shape: MoeShape) -> Path:
    name = (
        f"moe.{device.replace(' ', '_')}.E{shape.experts}.N{shape.hidden}.I{shape.width}."
        f"{str(shape.dtype).removeprefix('torch.')}.json"
    )
    return TABLES / name


@cache
def read_table(path: Path) -> dict[int, MoeTiling] | None:
    """Number of tokens -> tiling; None if there is no such file."""
    if not path.is_file():
        return None
    return msgspec.json.decode(path.read_bytes(), type=dict[int, MoeTiling], strict=False)


def default_tiling(shape: MoeShape, tokens: int, top_k: int, on: Limits = H200) -> MoeTiling:
    """What was among the fastest on an H200 for experts of V2-Lite's size, 6 or 8 of 64 or 66 for a token: in whole
    steps of 1, 8, 32 and 128 to 256 requests and of prompts of 384 to 1,024 tokens, else by itself.

    Few rows an expert: small blocks, as the weights' way from memory is what takes time. Many: blocks
    that keep the tensor cores busy. Blocks of 128 rows need the tensor memory accelerator: without it, Triton
    makes of its tiles addresses for which the sums of a product leave no registers.
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
