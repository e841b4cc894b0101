"""Which recording a step takes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mla_router.worker.core import PrefillChunk, StepPlan
from mla_router.worker.engine.graphs import DecodeGraphs, Recording, graph_sizes
from mla_router.worker.engine.pieces import piece_sizes
from mla_router.worker.kernels.kv_cache.locations import LookedUp


def recording(size: int) -> Recording:
    nothing = torch.empty(0)
    looked_up = LookedUp(*[nothing] * 5)
    return Recording(None, size, looked_up, nothing)  # type: ignore[arg-type]


def decodes(size: int, *chunks: PrefillChunk) -> StepPlan:
    return StepPlan(tuple(range(size)), tuple(range(5, 5 + size)), chunks, (), ())


@pytest.mark.parametrize("largest", [1, 2, 3, 5, 7, 8, 100, 256, 1000])
def test_sizes_pad_little(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest
    for batch in range(1, largest + 1):
        taken = min(size for size in sizes if size >= batch)
        assert taken - batch <= max(3, batch // 4)


@pytest.mark.parametrize("largest", [0, 15, 16, 100, 4096])
def test_rows_of_pieces(largest: int) -> None:
    sizes = piece_sizes(largest)
    assert sizes == sorted(set(sizes)) and all(16 <= size <= largest for size in sizes)
    assert all(after <= 1.5 * size for size, after in pairwise(sizes))
    assert largest < 16 or sizes[-1] > largest / 1.5


def test_the_smallest_that_fits_is_taken() -> None:
    graphs = DecodeGraphs([recording(8), recording(2), recording(4)])
    taken = {n: graphs.fitting(decodes(n)) for n in range(1, 10)}
    assert [r.size if r else None for r in taken.values()] == [2, 2, 4, 4, 8, 8, 8, 8, None]


def test_tokens_of_chunks_are_rows_as_well() -> None:
    graphs = DecodeGraphs([recording(8), recording(4)])
    three = PrefillChunk(9, 0, (1, 2, 3), is_last=True)
    scored = PrefillChunk(9, 0, (1, 2, 3), is_last=True, score_tokens=(2,))

    def taken(plan: StepPlan) -> int | None:
        fitting = graphs.fitting(plan)
        return fitting.size if fitting else None

    assert [taken(decodes(n, three)) for n in (0, 1, 2, 5, 6)] == [4, 4, 8, 8, None]
    assert taken(decodes(1, three, PrefillChunk(7, 5, (4, 5), is_last=False))) == 8
    assert taken(decodes(2, scored)) is None
    assert taken(decodes(0)) is None
    assert DecodeGraphs().fitting(decodes(2, three)) is None
