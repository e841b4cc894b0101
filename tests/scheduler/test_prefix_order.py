"""Requests with a common prefix are adjacent in a decode step."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.scheduler.place import Place
from mla_router.worker.scheduler.prefix_order import order_by_prefix
from mla_router.worker.scheduler.request import Request
from support.scripted_scheduler import generate


def holding(*pages: int) -> Request:
    request = Request(generate("r", [0]))
    request.place = Place(pages=list(pages))
    return request


def runs_of(requests: list[Request], pages: int) -> list[tuple[int, ...]]:
    """Returns the first pages of each run of adjacent requests with equal ones."""
    return [first for first, _ in groupby(tuple(r.place.pages[:pages]) for r in requests)]


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), max_size=40))
def test_side_by_side(held: list[list[int]]) -> None:
    """Requests with 1, 2, 4 or 8 common pages are adjacent."""
    requests = [holding(*pages) for pages in held]
    found = order_by_prefix(requests)
    assert sorted(map(id, found)) == sorted(map(id, requests))
    runs = runs_of(found, 1)
    assert len(set(runs)) == len(runs)
    # Only some pages count: requests that agree in these are adjacent
    for deciding in ((0, 1), (0, 1, 3), (0, 1, 3, 7)):
        whole = [r for r in found if len(r.place.pages) > deciding[-1]]
        if len(whole) == len(found):
            keys = [
                key for key, _ in groupby(tuple(r.place.pages[i] for i in deciding) for r in found)
            ]
            assert len(set(keys)) == len(keys)


def test_runs_are_in_the_order_of_their_first_requests() -> None:
    requests = [holding(7, 1), holding(3, 2), holding(7, 4), holding(5, 3), holding(3, 1)]
    assert [r.place.pages[0] for r in order_by_prefix(requests)] == [7, 7, 3, 3, 5]


def test_requests_without_common_pages_keep_their_order() -> None:
    requests = [holding(7, 1), holding(3, 1), holding(5, 1)]
    assert order_by_prefix(requests) is requests
    assert order_by_prefix([]) == []


def test_a_retracted_request_gets_a_new_key() -> None:
    a, b, c = holding(1, 2), holding(1, 3), holding(1, 2)
    assert order_by_prefix([a, b, c]) == [a, c, b]
    a.place = Place(pages=[1, 3])
    assert order_by_prefix([a, b, c]) == [c, a, b]
