"""The rendezvous of the ranks. An error names missing ranks within the time limit."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mla_router.worker.ranks.errors import RanksError
from mla_router.worker.ranks.rendezvous import Rendezvous, store_path


@pytest.fixture
def store() -> Path:
    return store_path(os.memfd_create("ranks"))


def test_all_ranks_meet_twice(store: Path) -> None:
    first = Rendezvous(store, 0, 3, timeout_s=60)
    with ThreadPoolExecutor() as pool:
        arrived = pool.submit(first.all_arrived)
        others = [Rendezvous(store, rank, 3, timeout_s=60) for rank in (1, 2)]
        arrived.result()
        loaded = pool.submit(first.all_loaded)
        for one in (first, *others):
            assert not loaded.done()
            one.report_loaded()
        loaded.result()


@pytest.mark.parametrize("waiting", [0, 2])
def test_missing_ranks_are_named(store: Path, waiting: int) -> None:
    present = {rank: Rendezvous(store, rank, 4, timeout_s=0.1) for rank in (0, 2)}
    with pytest.raises(
        RanksError, match=r"^after 0.1 s .* rank 1 and rank 3 of 4 ranks have not started"
    ):
        present[waiting].all_arrived()


def test_a_missing_rank_0_is_named(store: Path) -> None:
    with pytest.raises(RanksError, match="rank 0 of 2 ranks has not started"):
        Rendezvous(store, 1, 2, timeout_s=0.1).all_arrived()


def test_a_rank_that_does_not_load_is_named(store: Path) -> None:
    first = Rendezvous(store, 0, 2, timeout_s=0.1)
    Rendezvous(store, 1, 2, timeout_s=0.1)
    first.all_arrived()
    first.report_loaded()
    with pytest.raises(RanksError, match="rank 1 of 2 ranks has not loaded"):
        first.all_loaded()
