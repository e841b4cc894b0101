"""Tables of tilings: the choice of an entry, and the defaults without a table."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from mla_router.worker.kernels.moe import tiling as module
from mla_router.worker.kernels.moe.tiling import (
    MoeShape,
    MoeTiling,
    Tile,
    default_tiling,
    moe_tiling,
    table_path,
)

SHAPE = MoeShape(experts=64, hidden=2048, width=1408, dtype=torch.bfloat16)
TABLE = {
    tokens: MoeTiling(rows=rows, gate_up=Tile(32, 64), down=Tile(64, 64, group_m=4))
    for tokens, rows in ((1, 1), (8, 16), (1024, 128))
}


@pytest.mark.parametrize(
    ("tokens", "rows"), [(1, 1), (2, 16), (8, 16), (9, 128), (1024, 128), (5000, 128)]
)
def test_the_next_tuned_number_of_tokens(
    tokens: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TABLES", tmp_path)
    path = table_path("NVIDIA H200", SHAPE)
    assert path.name == "moe.NVIDIA_H200.E64.N2048.I1408.bfloat16.json"
    path.write_bytes(msgspec.json.encode(TABLE))
    assert moe_tiling("NVIDIA H200", SHAPE, tokens, 6).rows == rows


def test_one_token_has_an_entry_of_its_own_or_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shared experts require that tiling."""
    monkeypatch.setattr(module, "TABLES", tmp_path)
    later = {tokens: tiling for tokens, tiling in TABLE.items() if tokens > 1}
    table_path("another GPU", SHAPE).write_bytes(msgspec.json.encode(later))
    assert moe_tiling("another GPU", SHAPE, 1, 6) == default_tiling(SHAPE, 1, 6)
    assert moe_tiling("another GPU", SHAPE, 2, 6) == TABLE[8]


def test_without_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLES", tmp_path)
    assert moe_tiling("a GPU", SHAPE, 40, 6) == default_tiling(SHAPE, 40, 6)


def test_defaults_have_larger_blocks_for_more_tokens() -> None:
    rows = [default_tiling(SHAPE, tokens, 6).rows for tokens in (1, 4, 64, 512, 8192)]
    assert rows == sorted(rows) and rows[0] == 1 and rows[-1] == 128


def test_a_table_that_is_no_table_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TABLES", tmp_path)
    table_path("a GPU", SHAPE).write_text('{"8": {"rows": 16}}')
    with pytest.raises(msgspec.ValidationError, match="gate_up"):
        moe_tiling("a GPU", SHAPE, 8, 6)
