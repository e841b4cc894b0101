"""Collectives of few rows over the memory of GPUs: two processes on one GPU, and on two."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from support import one_shot
from support.one_shot import OPS, Call, expected
from support.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module", params=["one GPU", "GPUs"])
def two(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if request.param == "GPUs" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    processes = Ranks(2, f"mailboxes on {request.param}")
    yield processes
    processes.close()


def test_calls_of_changing_shapes(two: Ranks) -> None:
    draw = random.Random(0)
    shapes = [(1, 2048), (1, 7168), (128, 7168), (17, 512), (128, 2048), (3, 8)]
    calls = [Call(draw.choice(OPS), *draw.choice(shapes), seed) for seed in range(80)]
    for rank, results in enumerate(two.call(one_shot.on_a_gpu, calls, 0.004)):
        for call, got in zip(calls, results, strict=True):
            for result, wanted in zip(got, expected(call, rank, 2, torch.bfloat16), strict=True):
                close = 0.02 if call.op == "sum_add_norm" else 0.0
                torch.testing.assert_close(result, wanted, rtol=close, atol=close)


def test_graphs_replayed_many_times(two: Ranks) -> None:
    """Two processes on one GPU run by turns, so each call there takes milliseconds."""
    assert two.call(one_shot.in_graphs, 300) == [(300, 0)] * 2
