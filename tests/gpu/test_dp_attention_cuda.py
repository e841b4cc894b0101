"""DP ranks on several GPUs, over NCCL, give the results of separate engines on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support import dp_engine
from support.dp_engine import Case, Division, together
from support.ranks import Ranks
from support.served_steps import CAPACITY, assert_same, served
from support.tiny_model import CONFIGS, write_tiny_model

pytestmark = pytest.mark.gpu
DIVISIONS = [
    Division(2, 2),
    Division(2, 2, expert_parts=2),
    Division(4, 4, expert_parts=4),
    Division(4, 2, expert_parts=4),
    Division(4, 2),
]


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_each_dp_rank_has_the_results_of_a_cpu(tmp_path: Path, division: Division) -> None:
    if torch.cuda.device_count() < division.size:
        pytest.skip(f"needs {division.size} GPUs")
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    alone = [served(tmp_path, seed=3 + rank, count=8) for rank in range(division.dp_size)]
    steps = together([engine.steps for engine in alone], seed=3)
    ranks = Ranks(division.size, "cuda")
    try:
        seen = ranks.call(dp_engine.repeat, ranks.folder, division, Case(tmp_path, CAPACITY), steps)
    finally:
        ranks.close()
    for rank, outcome in enumerate(seen):
        assert_same(outcome.results, alone[rank * division.dp_size // division.size].results())
