"""Collectives over NCCL between the GPUs of a machine."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.rms_norm import add_rms_norm_torch, rms_norm_torch
from support import collectives
from support.collectives import inputs, numbers, rows_of
from support.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_collectives_give_the_numbers_of_gloo() -> None:
    two = Ranks(2, "cuda")
    try:
        assert two.call(collectives.name) == [(0, 2, "nccl"), (1, 2, "nccl")]
        gathered = two.call(collectives.all_gather, (5, 3), torch.bfloat16, 1, "cuda")
    finally:
        two.close()
    expected = torch.cat([numbers(rank, (5, 3), torch.bfloat16) for rank in range(2)], 1)
    assert all(torch.equal(result, expected) for result in gathered)


def test_rows_of_all_ranks() -> None:
    """Equal numbers of rows have collectives of their own. A rank may have none."""
    two = Ranks(2, "cuda")
    try:
        for counts in ((8, 8), (3000, 5), (0, 7), (1, 0)):
            own = [rows_of(rank, count, 2048, torch.bfloat16) for rank, count in enumerate(counts)]
            results = two.call(collectives.rows_of_all, counts, 2048, torch.bfloat16, "cuda")
            for rows, (gathered, summed) in zip(own, results, strict=True):
                assert torch.equal(gathered, torch.cat(own)), counts
                assert torch.equal(summed, 2 * rows), counts
    finally:
        two.close()


def test_kernels_around_a_sum_in_a_graph_wait_for_it() -> None:
    """Ours may start before their predecessor ends (`kernels/pdl.py`)."""
    seeds = range(50)
    two = Ranks(2, "cuda")
    try:
        results = two.call(collectives.in_a_graph, seeds)
    finally:
        two.close()
    weight = torch.ones(2048, dtype=torch.bfloat16)
    for seed in seeds:
        rows = [inputs(rank, seed) for rank in range(2)]
        total = sum(rms_norm_torch(x, weight, 1e-6) for x in rows)
        assert isinstance(total, torch.Tensor)
        for x, of_rank in zip(rows, results, strict=True):
            expected = add_rms_norm_torch(total, x, weight, 1e-6)[0]
            torch.testing.assert_close(of_rank[seed], expected, rtol=0.02, atol=0.02)
