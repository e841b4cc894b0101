"""Tables of tilings: the file form, and the shipped tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
import torch

from mla_router.worker.kernels import quantized_few_rows as few_rows
from mla_router.worker.kernels import tuned
from mla_router.worker.kernels.quantize import GROUP
from mla_router.worker.kernels.quantized_linear import Tiles, tuned_tiles
from mla_router.worker.kernels.tuned import TunedTile, dense_name, encode, kind_of, moe_name
from support.quantized import drawn_weight

FP8 = torch.float8_e4m3fn
SHIPPED = sorted(tuned.TABLES.glob("*.json"))
TILE = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 8,
    "num_warps": 4,
    "num_stages": 3,
}


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuned, "TABLES", tmp_path)
    tuned._dense_table.cache_clear()
    return tmp_path


def test_names() -> None:
    """SGLang's and vLLM's names for an H200."""
    kind = kind_of(FP8, (128, 128))
    assert dense_name(512, 7168, "NVIDIA_H200", kind) == (
        "N=512,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128]"
    )
    assert moe_name(256, 256, "NVIDIA_H200", kind, down=True) == (
        "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128]_down"
    )
    assert kind_of(torch.int8, (1, 512), activations=16) == ",dtype=int8_w8a16"
    assert kind_of(torch.bfloat16, (1, 1)) == ""


def test_dense_products_read_a_table(tables: Path) -> None:
    weight = drawn_weight(256, 384)
    assert tuned_tiles(20, weight) is None
    tuned._dense_table.cache_clear()
    name = "N=256,K=384,device_name=cpu,dtype=fp8_w8a8,block_shape=[128,128]"
    (tables / f"{name}.json").write_text(json.dumps({"64": TILE | {"num_stages": 4}, "32": TILE}))
    assert tuned_tiles(20, weight) == Tiles(16, 64, 128, 4, 3, 8)
    assert few_rows.tuned_tiles(8, weight) is None
    few = TILE | {"num_stages": 0}
    shipped = name.replace("w8a8", "w8a16").replace(",", ";")
    (tables / f"{shipped}.json").write_text(json.dumps({"8": few}))
    tuned._dense_table.cache_clear()
    assert few_rows.tuned_tiles(8, weight) == few_rows.Tiles(64, 4, 0)
    assert tuned_tiles(33, weight) == tuned_tiles(64, weight) == Tiles(16, 64, 128, 4, 4, 8)
    assert tuned_tiles(65, weight) is None


def test_a_table_is_written_as_it_is_read() -> None:
    """null: the tiling of the code."""
    tiles = {64: TunedTile(16, 64, 128, 8, 4, 3), 8: TunedTile(16, 32, 128, 1, 4, 2), 32: None}
    text = encode(tiles)
    written = json.loads(text)
    assert list(written) == ["8", "32", "64"] and written["64"] == TILE and written["32"] is None
    assert tuned.decode(text) == tiles


@pytest.mark.parametrize("entry", [{"BLOCK_SIZE_M": 16}, TILE | {"SPLIT_K": 2}])
def test_another_form_is_refused(tables: Path, entry: dict[str, int]) -> None:
    (tables / "x.json").write_text(json.dumps({"8": entry}))
    with pytest.raises(msgspec.ValidationError):
        tuned.read_table("x")


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_tables_suit_their_kernels(file: Path) -> None:
    """A step lies within one scale of the rows and one of the weight. Both tables of experts have the same blocks."""
    assert re.fullmatch(
        r"(N=\d+;K=\d+|E=\d+;N=\d+);device_name=\w+?(;dtype=\w+?;block_shape=\[128;128\])?(_down)?",
        file.stem,
    )
    table = {rows: tile for rows, tile in tuned.decode(file.read_bytes()).items() if tile}
    for tile in table.values():
        assert tile.block_m in (1, 8, 16, 32, 64, 128) and tile.num_warps in (2, 4, 8, 12)
        assert "fp8" not in file.stem or GROUP % tile.block_k == 0
    if file.stem.endswith("_down"):
        first = file.with_stem(file.stem.removesuffix("_down"))
        both = tuned.decode(first.read_bytes())
        gate_up = {rows: tile for rows, tile in both.items() if tile}
        assert {rows: tile.block_m for rows, tile in gate_up.items()} == {
            rows: tile.block_m for rows, tile in table.items()
        }
        if "fp8" in file.stem:
            # The rows of the second product have a scale for each tile of the first
            assert all(gate_up[rows].block_n % tile.block_k == 0 for rows, tile in table.items())
