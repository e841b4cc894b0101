"""Collectives of few rows over the memory of GPUs: several processes on one GPU, and on as many GPUs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from support import one_shot
from support.gpu_ranks import SIZES, ranks_on_gpus
from support.one_shot import OPS, Call, expected
from support.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module", params=SIZES, ids=lambda param: f"{param[1]} ranks on {param[0]}")
def group(request: pytest.FixtureRequest) -> Iterator[tuple[Ranks, int]]:
    yield from ranks_on_gpus(*request.param, "mailboxes")


def test_calls_of_changing_shapes(group: tuple[Ranks, int]) -> None:
    ranks, size = group
    draw = random.Random(0)
    shapes = [(1, 2048), (1, 7168), (256 // size, 7168 // (size - 1)), (17, 512), (3, 8)]
    calls = [Call(draw.choice(OPS), *draw.choice(shapes), seed) for seed in range(80)]
    for rank, results in enumerate(ranks.call(one_shot.on_a_gpu, calls, 0.004)):
        for call, got in zip(calls, results, strict=True):
            for result, wanted in zip(got, expected(call, rank, size, torch.bfloat16), strict=True):
                close = 0.02 if call.op == "sum_add_norm" else 0.0
                torch.testing.assert_close(result, wanted, rtol=close, atol=close)


def test_graphs_replayed_many_times(group: tuple[Ranks, int]) -> None:
    """Processes on one GPU run by turns, so each call there takes milliseconds."""
    ranks, size = group
    assert ranks.call(one_shot.in_graphs, 300) == [(300, 0)] * size
