"""Where the experts are, by the tables of all ranks."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.parallel.placement import (
    MAX_COLUMNS,
    Placement,
    balancedness,
    trivial,
)

# Experts 0 to 4 on 3 ranks, with 4 replicas: expert 0 is everywhere, 1 and 2 are twice there
PLACEMENT = Placement(((0, 1, 2, 3, 0, 1, 2, 4, 0), (0, 1, 2, 1, 0, 3, 4, 0, 2)), 5, 3)


@pytest.mark.parametrize("placement", [PLACEMENT, trivial(2, 6, 3), trivial(2, 6, 2, redundant=4)])
def test_each_pair_has_one_rank_that_has_its_expert(placement: Placement) -> None:
    for layer in range(2):
        members = [placement.members(layer, part) for part in range(placement.parts)]
        assert {own.full for own in members} == {placement.experts}
        tables = [placement.table(layer, part) for part in range(placement.parts)]
        columns = tables[0].shape[1]
        for expert in range(placement.experts):
            used = [0] * placement.parts
            for column in range(columns):
                [part] = [p for p, table in enumerate(tables) if table[expert, column] >= 0]
                assert members[part].indices[tables[part][expert, column]] == expert
                used[part] += 1
            replicas = sum(expert in own.indices for own in members)
            assert sorted(used)[-replicas:] == [columns // replicas] * replicas


def test_tables_have_a_limit() -> None:
    """The replicas of an expert whose number does not divide it are used nearly equally often."""
    times = [1, 2, 3, 4, 5, 7, 9, 9]  # lcm 1,260
    experts = len(times)
    packs = [[e for e in range(experts) if part < times[e]] for part in range(10)]
    filler = iter(range(experts, 10 * experts))
    rows = [pack + [next(filler) for _ in range(experts - len(pack))] for pack in packs]
    placement = Placement((tuple(chain.from_iterable(rows)),), max(map(max, rows)) + 1, 10)
    used = [(placement.table(0, part)[5] >= 0).sum().item() for part in range(10)]
    assert sorted(used) == [0] * 3 + [9] * 6 + [10] and sum(used) == MAX_COLUMNS


def test_in_order() -> None:
    assert trivial(1, 6, 3).layers == ((0, 1, 2, 3, 4, 5),)
    assert trivial(1, 6, 3).table(0, 1).flatten().tolist() == [-1, -1, 0, 1, -1, -1]
    assert trivial(1, 6, 2, redundant=2).layers == ((0, 1, 2, 3, 4, 5, 0, 1),)


def test_replicas_have_equal_shares_of_the_load() -> None:
    counts = torch.tensor([[30, 20, 10, 1, 2], [0, 0, 0, 0, 6]])
    assert PLACEMENT.loads(counts).tolist() == [[25, 21, 17], [0, 0, 6]]
    assert balancedness(PLACEMENT.loads(counts)) == pytest.approx((21 / 25 + 2 / 6) / 2)
    assert balancedness(torch.zeros(2, 3)) == 0.0


@pytest.mark.parametrize(
    ("layer", "parts", "message"),
    [
        ((0, 1, 2, 2), 2, "layer 0 of the expert location: rank 1 of 2 has an expert twice"),
        ((0, 1, 1, 0), 2, "not replicas of experts 0 to 2"),
        ((0, 1, 2, 3), 2, "not replicas of experts 0 to 2"),
        ((0, 1, 2, -1), 2, "not replicas of experts 0 to 2"),
        ((0, 1, 2, 0), 3, "4 cannot be divided into 3 equal parts: change --ep-size"),
    ],
)
def test_impossible_placements(layer: tuple[int, ...], parts: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Placement((layer,), 3, parts)
