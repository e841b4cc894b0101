"""The rendezvous of the ranks. An error names missing ranks within the time limit."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError

from mla_router.worker.ranks.errors import RanksError
from mla_router.worker.ranks.rendezvous import Rendezvous
from mla_router.worker.ranks.stores import StoreLocation


@pytest.fixture
def store() -> StoreLocation:
    return StoreLocation(os.memfd_create("ranks"))


def meet(
    store: StoreLocation, rank: int, size: int, *, timeout_s: float, nodes: int = 1
) -> Rendezvous:
    """Returns the view of a rank with a store of its own."""
    opened = store.open(rank, timeout_s)
    return Rendezvous(opened, rank, size, timeout_s=timeout_s, nodes=nodes)


def test_all_ranks_meet_twice(store: StoreLocation) -> None:
    first = meet(store, 0, 3, timeout_s=60)
    with ThreadPoolExecutor() as pool:
        arrived = pool.submit(first.all_arrived)
        others = [meet(store, rank, 3, timeout_s=60) for rank in (1, 2)]
        arrived.result()
        loaded = pool.submit(first.all_loaded)
        for one in (first, *others):
            assert not loaded.done()
            one.report_loaded()
        loaded.result()


@pytest.mark.parametrize("waiting", [0, 2])
def test_missing_ranks_are_named(store: StoreLocation, waiting: int) -> None:
    present = {rank: meet(store, rank, 4, timeout_s=0.1) for rank in (0, 2)}
    with pytest.raises(
        RanksError, match=r"^after 0.1 s .* rank 1 and rank 3 of 4 ranks have not started"
    ):
        present[waiting].all_arrived()


def test_a_missing_rank_0_is_named(store: StoreLocation) -> None:
    with pytest.raises(RanksError, match="rank 0 of 2 ranks has not started"):
        meet(store, 1, 2, timeout_s=0.1).all_arrived()


def test_a_rank_that_does_not_load_is_named(store: StoreLocation) -> None:
    first = meet(store, 0, 2, timeout_s=0.1)
    meet(store, 1, 2, timeout_s=0.1)
    first.all_arrived()
    first.report_loaded()
    with pytest.raises(RanksError, match="rank 1 of 2 ranks has not loaded"):
        first.all_loaded()


def test_the_node_of_a_missing_rank_is_named(store: StoreLocation) -> None:
    first = meet(store, 0, 4, timeout_s=0.1, nodes=2)
    with pytest.raises(
        RanksError, match=r"rank 1 \(node 0\) and rank 2 \(node 1\) and rank 3 \(node 1\) of 4"
    ):
        first.all_arrived()


def test_a_lost_store_is_no_timeout() -> None:
    store = Mock(Store)  # a TCPStore whose process has ended
    store.wait.side_effect = DistNetworkError("Failed to recv, got 0 bytes")
    here = Rendezvous(store, 1, 2, timeout_s=600)
    for wait in (here.all_arrived, here.all_loaded, lambda: here.told("an address")):
        with pytest.raises(RanksError, match=r"^rank 0, which .* has ended"):
            wait()
