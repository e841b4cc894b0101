"""The choice of the experts' tilings: a table's entry, and the defaults without a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from mla_router.worker.kernels import tuned
from mla_router.worker.kernels.moe.tiling import (
    MoeShape,
    MoeTiling,
    Tile,
    default_tiling,
    moe_tiling,
    tuned_tiling,
)
from mla_router.worker.kernels.tuned import TunedTile, encode, moe_name

SHAPE = MoeShape(experts=64, hidden=2048, width=1408, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuned, "TABLES", tmp_path)
    tuned.moe_tables.cache_clear()
    return tmp_path


def write(folder: Path, device: str, rows: Mapping[int, int | None], kind: str = "") -> None:
    """Writes both tables, with so many rows in a block for each number of tokens."""
    for down, width in ((False, 32), (True, 64)):
        tiles = {n: m and TunedTile(m, width, 128, 4, 4, 3) for n, m in rows.items()}
        file = folder / f"{moe_name(64, 1408, device, kind, down=down)}.json"
        file.write_bytes(encode(tiles))


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [(1, 1), (2, 16), (8, 16), (9, None), (32, None), (33, 128), (1024, 128), (1025, None)],
)
def test_the_next_tuned_number_of_tokens(tables: Path, tokens: int, rows: int | None) -> None:
    """Without a tile, and above the largest number, the defaults stay."""
    write(tables, "A_GPU", {1: 1, 8: 16, 32: None, 1024: 128})
    chosen = default_tiling(SHAPE, tokens, 6)
    if rows is not None:
        chosen = MoeTiling(rows, Tile(32, 128, 4, 4, 3), Tile(64, 128, 4, 4, 3))
    assert moe_tiling("A_GPU", SHAPE, tokens, 6) == chosen


def test_one_token_has_an_entry_of_its_own_or_the_default(tables: Path) -> None:
    """Its shared experts require that tiling."""
    write(tables, "A_GPU", {8: 16})
    assert moe_tiling("A_GPU", SHAPE, 1, 6) == default_tiling(SHAPE, 1, 6)
    assert moe_tiling("A_GPU", SHAPE, 2, 6).gate_up == Tile(32, 128, 4, 4, 3)


def test_a_table_is_for_one_device_and_format(tables: Path) -> None:
    write(tables, "A_GPU", {64: 16}, ",dtype=fp8_w8a8,block_shape=[128,128]")
    assert moe_tiling("A_GPU", SHAPE, 40, 6) == default_tiling(SHAPE, 40, 6)
    kind = tuned.kind_of(torch.float8_e4m3fn, (128, 128))
    assert tuned_tiling("A_GPU", 64, 1408, kind, 40) is not None
    assert tuned_tiling("A_GPU", 32, 1408, kind, 40) is None
    assert tuned_tiling("ANOTHER", 64, 1408, kind, 40) is None


def test_both_products_need_a_table(tables: Path) -> None:
    write(tables, "A_GPU", {8: 16})
    (tables / "E=64,N=1408,device_name=A_GPU_down.json").unlink()
    assert moe_tiling("A_GPU", SHAPE, 8, 6) == default_tiling(SHAPE, 8, 6)


def test_defaults_have_larger_blocks_for_more_tokens() -> None:
    rows = [default_tiling(SHAPE, tokens, 6).rows for tokens in (1, 4, 64, 512, 8192)]
    assert rows == sorted(rows) and rows[0] == 1 and rows[-1] == 128
