"""Experts packed by their load."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.parallel.balance import balanced
from mla_router.worker.model.parallel.placement import balancedness, trivial


def test_a_hot_expert_is_replicated_and_cold_ones_keep_it_company() -> None:
    placement = balanced([[9, 1, 1, 1], [1, 1, 1, 9]], 2, 2)
    assert placement.layers == ((0, 1, 2, 0, 1, 3), (0, 1, 3, 0, 2, 3))
    assert placement.loads(torch.tensor([[9, 1, 1, 1], [1, 1, 1, 9]])).tolist() == [[6, 6], [6, 6]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Returns loads, a number of ranks, and one of replicas."""
    parts, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    experts = draw(st.integers(size, parts * size))
    loads = draw(st.lists(st.integers(0, 20), min_size=experts, max_size=experts))
    return loads, parts, parts * size - experts


@given(cases())
def test_any_load(case: tuple[list[int], int, int]) -> None:
    """`Placement` refuses an expert that is missing, or twice on a rank. No expert has more load a replica than one that got
    a replica would have without it."""
    loads, parts, redundant = case
    placement = balanced([loads], parts, redundant)
    (row,) = placement.layers
    replicas = Counter(row)
    assert len(row) == len(loads) + redundant and placement == balanced([loads], parts, redundant)
    for expert, count in replicas.items():
        for other, number in replicas.items():
            if count > 1 and number < parts:
                assert loads[expert] / (count - 1) >= loads[other] / number


def test_close_to_the_best_of_all_packings() -> None:
    """Without replicas, six experts on two ranks."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        counts = torch.randint(1, 100, (1, 6), generator=generator)
        loads = counts[0].tolist()
        best = min(max(sum(order[:3]), sum(order[3:])) for order in permutations(loads))
        assert balanced(counts.tolist(), 2).loads(counts).max() <= 7 / 6 * best  # Graham's bound


def test_more_even_than_in_order() -> None:
    counts = torch.arange(1, 65).expand(3, -1) ** 2
    in_order = balancedness(trivial(3, 64, 8).loads(counts))
    assert in_order < 0.4
    assert balancedness(balanced(counts.tolist(), 8).loads(counts)) > 0.95
    assert balancedness(balanced(counts.tolist(), 8, 8).loads(counts)) > 0.98


@pytest.mark.parametrize(
    ("parts", "redundant", "message"),
    [
        (
            3,
            0,
            "4 experts and 0 replicas cannot be divided into 3 equal parts: change --ep-size or",
        ),
        (2, 6, "--ep-num-redundant-experts 6: at most 4, so that 2 ranks have no expert twice"),
    ],
)
def test_impossible_numbers(parts: int, redundant: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        balanced([[1, 2, 3, 4]], parts, redundant)
