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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("expert_parts", [1, 2])
def test_each_dp_rank_has_the_results_of_a_cpu(tmp_path: Path, expert_parts: int) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    alone = [served(tmp_path, seed=3 + rank, count=8) for rank in range(2)]
    steps = together([engine.steps for engine in alone], seed=3)
    two, division = Ranks(2, "cuda"), Division(2, 2, expert_parts)
    try:
        seen = two.call(dp_engine.repeat, two.folder, division, Case(tmp_path, CAPACITY), steps)
    finally:
        two.close()
    for outcome, engine in zip(seen, alone, strict=True):
        assert_same(outcome.results, engine.results())
