"""tune.py: shapes, candidates, and runs that are interrupted and go on."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from kernels.tune import solve
from kernels.tune_problems import Dense, Inputs, Job, Moe, Problem
from kernels.tune_shapes import MODELS, DenseShape, dense_shapes, divisions, experts_shape
from kernels.tune_space import BF16, FP8, SHARED_BYTES, candidates, rows_of_dense, rows_of_experts

from kernels import tune
from mla_router.worker.kernels.tuned import TunedTile

FP8_KIND = "dtype=fp8_w8a8,block_shape=[128,128]"


def test_shapes_of_deepseek_v3() -> None:
    """Compares with shapes that were computed by hand from the config."""
    v3 = MODELS["deepseek-v3"]
    whole = {(shape.outputs, shape.inputs) for shape in dense_shapes(v3, 1)}
    assert whole == {
        (2112, 7168),
        (24576, 1536),
        (32768, 512),
        (7168, 16384),
        (36864, 7168),
        (7168, 18432),
        (4096, 7168),
        (7168, 2048),
    }
    divided = {(shape.outputs, shape.inputs) for shape in dense_shapes(v3, 8)}
    assert {(2112, 7168), (3072, 1536), (7168, 2048), (512, 7168), (7168, 256)} < divided
    assert divisions([1, 8], [1, 8]) == [(1, 1), (8, 1), (8, 8)]
    names = []
    for tp, ep in divisions([1, 8], [1, 8]):
        shape = experts_shape(v3, tp, ep)
        assert shape is not None and shape.total == 256
        names.append(Moe(shape, torch.float8_e4m3fn).names("G")[0])
    assert names == [
        f"E={s},device_name=G,{FP8_KIND}" for s in ("256,N=2048", "256,N=256", "32,N=2048")
    ]


def test_blocks_of_scales_are_not_cut() -> None:
    lite = MODELS["deepseek-v2-lite"]
    assert experts_shape(lite, 8, 1) is None and experts_shape(lite, 8, 8) is not None
    for tp in (1, 8):
        assert all(tp == 1 or shape.inputs % 128 == 0 for shape in dense_shapes(lite, tp))


@pytest.mark.parametrize("number_bytes", [FP8, BF16])
def test_candidates(number_bytes: int) -> None:
    """Each number of rows has several, without duplicates, and within shared memory."""
    tried = {
        n for tokens in range(1, 9000, 7) for n in rows_of_experts(tokens, 8, 64, number_bytes)
    }
    assert tried == {16, 32, 64, 128} | ({1} if number_bytes == BF16 else set())
    for rows in tried:
        for stage, inputs in (("gate_up", 7168), ("down", 2048)):
            tiles = list(candidates(stage, rows, inputs, number_bytes))  # type: ignore[arg-type]
            assert len(tiles) >= 4 and len(set(tiles)) == len(tiles)
            for tile in tiles:
                columns = tile.block_n * (2 if stage == "gate_up" else 1)
                held = tile.num_stages * (rows + columns) * tile.block_k * number_bytes
                assert rows == 1 or held <= SHARED_BYTES
    found = [rows_of_dense(rows) for rows in (2, 16, 17, 64, 4096)]
    assert found == [(16, 32), (16, 32), (16, 32, 64), (32, 64, 128), (64, 128)]


def test_the_fastest_tiles_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both products of experts have the same blocks, and a step of the second lies within one scale of the first's
    result. Times are drawn: nothing is launched."""
    draw = random.Random(1)
    times: dict[TunedTile, float] = {}
    monkeypatch.setattr(tune, "timed", lambda _, tile, *__: times.setdefault(tile, draw.random()))
    inputs = Inputs("meta")
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        shape = experts_shape(MODELS["deepseek-v3"], 8, 8)
        assert shape is not None
        problem = Moe(shape, dtype)
        for size in problem.sizes:
            (gate_up, down), us = solve(problem, size, set(problem.jobs(size)), inputs)
            assert gate_up.tile.block_m == down.tile.block_m and us > 0
            assert dtype == torch.bfloat16 or gate_up.tile.block_n % down.tile.block_k == 0
    dense = Dense(DenseShape(24576, 1536))
    assert dense.sizes == (48, 64, 96)
    for size in dense.sizes:
        jobs = set(dense.jobs(size))
        ((job,), _) = solve(dense, size, jobs, inputs)
        assert any(replace(job.tile, group_m=other.tile.group_m) == other.tile for other in jobs)


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of the numbers of rows before the interrupt stay, and --resume measures the rest alone. The code's
    tiles stay where no other is faster."""
    solved: list[tuple[str, int]] = []
    stop_at = 4

    def fake(problem: Problem, size: int, *_: Any) -> tuple[list[Job], float]:
        if len(solved) == stop_at:
            raise KeyboardInterrupt
        solved.append((problem.names("G")[0], size))
        tile = TunedTile(16, 64, 128, 8, 4, size % 7)
        jobs = [Job("gate_up", tile), Job("down", tile)]
        us = 0.9 if size == 96 else 1.0
        return (jobs, 2 * us) if isinstance(problem, Moe) else (jobs[:1], us)

    monkeypatch.setattr(tune, "solve", fake)
    monkeypatch.setattr(tune, "timed", lambda *_: 1.0)
    monkeypatch.setattr(tune, "Inputs", lambda _: Inputs("meta"))
    monkeypatch.setattr(tune.Compilations, "__init__", lambda *_: None)
    monkeypatch.setattr(tune.Compilations, "fits", lambda *_: set())
    monkeypatch.setattr(tune.Compilations, "close", lambda _: None)
    monkeypatch.setattr(tune, "device_name", lambda _: "G")
    words = ["tune.py", "all", "--shapes", "deepseek-v2-lite", "--out", str(tmp_path)]
    words += ["--tokens", "96", "8", "16"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(KeyboardInterrupt):
        tune.main()
    assert len(list(tmp_path.glob("*.json"))) == 3
    before, stop_at = list(solved), -1
    monkeypatch.setattr(sys, "argv", [*words, "--resume"])
    tune.main()
    assert len(set(solved)) == len(solved) == 17 and solved[:4] == before
    tables = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert len(tables) == 6 + 2 + 2 and f"E=64,N=1408,device_name=G,{FP8_KIND}_down" in tables
    for name, table in tables.items():
        if "w8a16" in name:  # 16 rows of so many inputs have another kernel
            assert list(table) == (["8"] if "K=10944" in name else ["8", "16"])
        else:  # few rows have other kernels
            assert list(table) == (["8", "16", "96"] if name.startswith("E=") else ["96"])
        assert all((tile is None) == (rows != "96") for rows, tile in table.items())
    assert not list(tmp_path.glob("*.partial"))
