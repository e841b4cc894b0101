"""The workers on other nodes (DP ranks of --nnodes), as the router of node 0 knows them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_router import Router

log = logging.getLogger(__name__)


class RemoteWorkers:
    """Keeps the router's list of workers on other nodes up to date."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._urls: dict[int, Sequence[str]] = {}

    @property
    def urls(self) -> list[str]:
        """The addresses of all, by node."""
        return [url for node in sorted(self._urls) for url in self._urls[node]]

    def come(self, node: int, urls: Sequence[str]) -> None:
        """Adds the workers of a node to the router, and removes those of its earlier start that it has no longer."""
        before, self._urls[node] = set(self._urls.get(node, ())), urls
        for url in before - set(urls):
            _change(self._router.remove_worker, url)
        for url in set(urls) - before:
            _change(self._router.add_worker, url)


def _change(change: Callable[[str], object], url: str) -> None:
    """Logs an error: an operator may have made the same change, and the node must not wait for its answer."""
    from mla_router import RouterError

    try:
        change(url)
    except RouterError as error:
        log.warning("%s", error)
