"""Tables of tilings that were measured on a GPU. They are shipped in `tables/`, and `bench/kernels/tune.py` writes them.

Names and fields are those of SGLang and vLLM. A file belongs to one kernel, shape and device, and maps numbers of rows to
tilings. Dense products are named by outputs N and inputs K, those of experts by experts E and intermediate size N; the
file of the experts' second product ends in `_down`. A file is read once, when the shape is first multiplied.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

TABLES = Path(__file__).parent / "tables"
KINDS = {torch.float8_e4m3fn: ",dtype=fp8_w8a8", torch.int8: ",dtype=int8_w8a8"}

NAMES = {
    "block_m": "BLOCK_SIZE_M",
    "block_n": "BLOCK_SIZE_N",
    "block_k": "BLOCK_SIZE_K",
    "group_m": "GROUP_SIZE_M",
}


class TunedTile(msgspec.Struct, frozen=True, rename=NAMES, forbid_unknown_fields=True):
    """Rows, outputs and inputs of a step; blocks of rows that share weights in L2; warps; steps under way at once."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


class Table(NamedTuple):
    rows: tuple[int, ...]  # ascending
    tiles: tuple[TunedTile, ...]

    def at(self, rows: int) -> TunedTile:
        """Returns the tile of the next tuned number of rows, or of the largest one."""
        return self.tiles[min(bisect_left(self.rows, rows), len(self.rows) - 1)]


def dense_name(outputs: int, inputs: int, device: str, kind: str) -> str:
    """Returns the name of a table without its suffix. `kind`: see `kind_of`."""
    return f"N={outputs},K={inputs},device_name={device}{kind}"


def moe_name(experts: int, width: int, device: str, kind: str, *, down: bool) -> str:
    return f"E={experts},N={width},device_name={device}{kind}" + ("_down" if down else "")


def kind_of(dtype: torch.dtype, block: tuple[int, int]) -> str:
    """Returns the part of a name for weights of `dtype`; plain ones have none."""
    kind = KINDS.get(dtype, "")
    return f"{kind},block_shape=[{block[0]},{block[1]}]" if kind and block[0] > 1 else kind


@cache
def device_name(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name.replace(" ", "_")


@cache
def read_table(name: str) -> Table | None:
    """Returns the table `name`; None if there is none. Raises msgspec.ValidationError."""
    file = TABLES / f"{name}.json"
    if not file.is_file():
        return None
    tiles = decode(file.read_bytes())
    return Table(tuple(sorted(tiles)), tuple(tiles[rows] for rows in sorted(tiles)))


def decode(text: bytes) -> dict[int, TunedTile]:
    return msgspec.json.decode(text, type=dict[int, TunedTile], strict=False)


def encode(tiles: dict[int, TunedTile]) -> bytes:
    ordered = {str(rows): tiles[rows] for rows in sorted(tiles)}
    return msgspec.json.format(msgspec.json.encode(ordered), indent=4) + b"\n"
