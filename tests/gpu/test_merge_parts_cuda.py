"""The merge of partial results of decode attention at V2-Lite's shape, for the parts of an H200."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.attention.merge_parts import merge_parts
from support.cuda import forbid_waiting
from support.partial_results import random_results

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "blocks", [[264], [17], [1, 200, 2, 61], [9] * 8, [5] * 32, [5] * 64, [1, 2] * 256]
)
def test_float64(blocks: list[int]) -> None:
    results = random_results(blocks, 1, rows=16, width=512, device="cuda")
    out = torch.full((len(blocks), 16, 512), 7.0, dtype=torch.bfloat16, device="cuda")
    schedule = results.schedule
    with forbid_waiting():
        merge_parts(results.out, results.lse, schedule, out)
    for got, expected in zip(out, results.merged(), strict=True):
        if expected is None:
            assert (got == 7).all()
        else:
            assert (got.double() - expected).norm() / expected.norm() < 3e-3
