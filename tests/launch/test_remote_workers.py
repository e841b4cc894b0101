"""The workers of other nodes in the router of node 0, whose list operators change as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mla_router import Router, RouterConfig
from mla_router.launch.remote_workers import RemoteWorkers

A, B, C = (f"http://127.0.0.1:{port}" for port in (1, 2, 3))


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router(RouterConfig(port=0))
    router.start()
    yield router
    router.stop(1.0)


def urls(router: Router) -> set[str]:
    return {str(worker["url"]) for worker in router.workers()}


def test_a_node_that_comes_again_replaces_its_workers(router: Router) -> None:
    workers = RemoteWorkers(router)
    workers.come(2, [C])
    workers.come(1, [A])
    assert workers.urls == [A, C]
    workers.come(1, [B])
    assert urls(router) == {B, C}


def test_a_node_comes_although_an_operator_has_changed_the_list(router: Router) -> None:
    """An error would leave the node waiting for ever, and with it the group."""
    workers = RemoteWorkers(router)
    workers.come(1, [A])
    router.remove_worker(A)
    router.add_worker(B)
    workers.come(1, [B, C])
    assert urls(router) == {B, C}
