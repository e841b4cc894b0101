"""Few rows to the ranks of their experts over the memory of GPUs: several processes on one GPU, and on as many GPUs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support import all_to_all
from support.all_to_all import Rows, expected
from support.exchanged_experts import both_ways
from support.gpu_ranks import SIZES, ranks_on_gpus
from support.ranks import Ranks
from support.tiny_model import CONFIGS, raw_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module", params=SIZES, ids=lambda param: f"{param[1]} ranks on {param[0]}")
def group(request: pytest.FixtureRequest) -> Iterator[tuple[Ranks, int]]:
    yield from ranks_on_gpus(*request.param, "row boxes")


def test_calls_of_changing_shapes(group: tuple[Ranks, int]) -> None:
    """Results of rows that must not come back are NaN. Afterwards no slot holds anything, so no row went where it has no
    expert."""
    ranks, size = group
    draw = random.Random(0)
    shapes = [(1, 2048), (256, 2048), (128, 7168), (17, 512), (3, 8)]
    dtypes = (None, torch.float8_e4m3fn, torch.int8)
    cases = []
    for seed in range(12):
        count, width = draw.choice(shapes)
        cases.append(Rows((count,) * size, width, draw.choice(dtypes), seed))
    results = ranks.call(all_to_all.run_all, cases, 0.004)
    assert all(ranks.call(all_to_all.is_empty))
    for rank, outcomes in enumerate(results):
        for rows, outcome in zip(cases, outcomes, strict=True):
            for got, wanted in zip(outcome, expected(rows, rank, torch.bfloat16), strict=True):
                assert torch.equal(got, wanted), rows


@pytest.mark.parametrize("quantized", [False, True])
def test_a_layer_of_experts_on_two_gpus(tmp_path: Path, quantized: bool) -> None:
    """Rows that are gathered give the same results, up to the order of sums in the gate."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    config = CONFIGS["v3"] | {"hidden_size": 256, "moe_intermediate_size": 128}
    if quantized:
        blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        config |= {"quantization_config": blocks | {"fmt": "e4m3", "activation_scheme": "dynamic"}}
    (tmp_path / "config.json").write_text(json.dumps(raw_config(config)))
    ranks = Ranks(2, "cuda")
    try:
        found = ranks.call(both_ways, tmp_path, (40, 40), torch.bfloat16)
    finally:
        ranks.close()
    for gathered, sent, was_quantized in found:
        assert was_quantized == quantized
        torch.testing.assert_close(sent, gathered, rtol=0.05, atol=0.05)


def test_graphs_replayed_many_times(group: tuple[Ranks, int]) -> None:
    """Processes on one GPU run by turns, so each call there takes milliseconds."""
    ranks, size = group
    assert ranks.call(all_to_all.in_graphs, 200) == [(200, 0)] * size
    assert all(ranks.call(all_to_all.is_empty))
