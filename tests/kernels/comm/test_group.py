"""Collectives between processes, over gloo."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.comm.group import Group
from support import collectives
from support.collectives import numbers, rows_of
from support.ranks import Ranks, ranks

SHAPES = [(), (1,), (5, 3), (0, 4), (300, 70)]
DTYPES = [torch.float32, torch.bfloat16]


def test_each_process_knows_its_rank() -> None:
    assert ranks(2).call(collectives.name) == [(0, 2, "gloo"), (1, 2, "gloo")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_reduce_gives_each_rank_the_same_sum(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    first, *others = ranks(4).call(collectives.all_reduce, shape, dtype)
    expected = sum(numbers(rank, shape, dtype).double() for rank in range(4))
    tolerance = 1e-6 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(first.double(), expected, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(5, 3), (1, 7), (0, 4)])
def test_all_gather_joins_in_the_order_of_the_ranks(shape: tuple[int, ...], dim: int) -> None:
    results = ranks(2).call(collectives.all_gather, shape, torch.float32, dim)
    expected = torch.cat([numbers(rank, shape, torch.float32) for rank in range(2)], dim)
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("counts", [(2, 2), (3, 0), (1, 5), (0, 0)])
def test_rows_of_all_ranks(counts: tuple[int, int]) -> None:
    own = [rows_of(rank, count, 3, torch.float32) for rank, count in enumerate(counts)]
    results = ranks(2).call(collectives.rows_of_all, counts, 3, torch.float32)
    for rows, (gathered, summed) in zip(own, results, strict=True):
        assert torch.equal(gathered, torch.cat(own))
        assert torch.equal(summed, 2 * rows)


def test_one_rank_has_no_backend_and_gets_its_argument() -> None:
    group, x = Group.alone(), torch.randn(2, 3)
    assert (group.rank, group.size, group.backend) == (0, 1, "")
    assert group.all_reduce(x) is x
    assert group.all_gather(x, 1) is x
    assert group.gather_rows(x, ()) is group.scatter_rows(x, ()) is x


def test_a_collective_raises_if_a_rank_ends() -> None:
    with pytest.raises(AssertionError, match=r"RuntimeError: .*[Cc]onnection"):
        Ranks(3).call(collectives.all_reduce_without, 2)
