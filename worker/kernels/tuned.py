"""Tables of tilings that were measured on a GPU. They are shipped in `tables/`, and `bench/kernels/tune.py` writes them.

Names and fields are those of SGLang and vLLM. A file belongs to one kernel, shape and device, and maps numbers of rows to
tilings. Dense products are named by outputs N and inputs K, those of experts by experts E and intermediate size N; the file
of the experts' second product ends in `_down`. A file is read once, when the shape is first multiplied. An entry is null
where no tiling was faster than the rules in the code, which also serve more rows than were tuned. Shipped files have a
semicolon for each comma of the name: maturin does not quote commas in the wheel's list of files, so that pip would not find
them again.

`w8a8` kernels round activations, `w8a16` ones do not (`quantized_few_rows.py`: 0 stages are all weights at once). 12
warps are those of Hopper's kernels for experts (`moe/quantized_gemm_hopper.py`, `moe/quantized_few_hopper.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from mla_router.worker.kernels.weight import Weight

TABLES = Path(__file__).parent / "tables"
FORMATS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}

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
    tiles: tuple[TunedTile | None, ...]

    def at(self, rows: int) -> TunedTile | None:
        """Returns the tile of the next tuned number of rows, or None: the code chooses."""
        index = bisect_left(self.rows, rows)
        return self.tiles[index] if index < len(self.rows) else None


def dense_name(outputs: int, inputs: int, device: str, kind: str) -> str:
    """Returns the name of a table without its suffix. `kind`: see `kind_of`."""
    return f"N={outputs},K={inputs},device_name={device}{kind}"


def moe_name(experts: int, width: int, device: str, kind: str, *, down: bool) -> str:
    return f"E={experts},N={width},device_name={device}{kind}" + ("_down" if down else "")


def kind_of(dtype: torch.dtype, block: tuple[int, int], *, activations: int = 8) -> str:
    """Returns the part of a name for weights of `dtype` and activations of this many bits; plain weights have none."""
    if dtype not in FORMATS:
        return ""
    blocks = f",block_shape=[{block[0]},{block[1]}]" if block[0] > 1 else ""
    return f",dtype={FORMATS[dtype]}_w8a{activations}{blocks}"


def dense_tile(weight: Weight, rows: int, *, activations: int = 8) -> TunedTile | None:
    """Returns the tile of a product with a quantized dense weight, or None: the code chooses."""
    outputs, inputs = weight.values.shape
    device, dtype = weight.values.device, weight.values.dtype
    table = _dense_table(outputs, inputs, device, dtype, weight.block, activations)
    return None if table is None else table.at(rows)


@cache
def _dense_table(
    outputs: int,
    inputs: int,
    device: torch.device,
    dtype: torch.dtype,
    block: tuple[int, int],
    activations: int,
) -> Table | None:
    kind = kind_of(dtype, block, activations=activations)
    return read_table(dense_name(outputs, inputs, device_name(device), kind))


@cache
def moe_tables(experts: int, width: int, device: str, kind: str) -> tuple[Table, Table] | None:
    """Returns the tables of both products of experts, or None if one is missing."""
    gate_up, down = (
        read_table(moe_name(experts, width, device, kind, down=down)) for down in (False, True)
    )
    return None if gate_up is None or down is None else (gate_up, down)


@cache
def device_name(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name.replace(" ", "_")


def read_table(name: str) -> Table | None:
    """Returns the table `name`; None if there is none. Raises msgspec.ValidationError."""
    files = (TABLES / f"{each}.json" for each in (name, name.replace(",", ";")))
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return None
    tiles = decode(file.read_bytes())
    return Table(tuple(sorted(tiles)), tuple(tiles[rows] for rows in sorted(tiles)))


def decode(text: bytes) -> dict[int, TunedTile | None]:
    return msgspec.json.decode(text, type=dict[int, TunedTile | None], strict=False)


def encode(tiles: Mapping[int, TunedTile | None]) -> bytes:
    ordered = {str(rows): tiles[rows] for rows in sorted(tiles)}
    return msgspec.json.format(msgspec.json.encode(ordered), indent=4) + b"\n"
