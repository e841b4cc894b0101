"""The tilings of tune_moe.py: every number of rows has candidates, without duplicates."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from kernels.moe_space import SHARED_BYTES, Stage, candidates, rows_for

from mla_router.worker.kernels.moe.tiling import MoeShape

SHAPES = [
    MoeShape(experts=64, hidden=2048, width=1408, dtype=torch.bfloat16),
    MoeShape(experts=256, hidden=7168, width=2048, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"E{shape.experts}")
@pytest.mark.parametrize("stage", ["gate_up", "down"])
def test_candidates(stage: Stage, shape: MoeShape) -> None:
    tried = {rows for tokens in range(1, 9000, 7) for rows in rows_for(tokens, 8, shape.experts)}
    assert tried == {1, 16, 32, 64, 128}
    for rows in tried:
        tiles = list(candidates(stage, rows, shape))
        assert len(tiles) >= 10 and len(set(tiles)) == len(tiles)
        for tile in tiles:
            # A block's steps under way hold its rows, and of gate_up two weights
            columns = tile.block_n * (2 if stage == "gate_up" else 1)
            held = tile.num_stages * (rows + columns) * tile.block_k * 2
            assert rows == 1 or held <= SHARED_BYTES
