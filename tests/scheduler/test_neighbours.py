"""Requests that begin alike are neighbours in a decode step."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.core import SamplingParams
from mla_router.worker.scheduler.neighbours import neighbours
from mla_router.worker.scheduler.request import Request


def holding(*pages: int) -> Request:
    request = Request("r", [0], SamplingParams(1))
    request.pages = list(pages)
    return request


def begins(requests: list[Request], pages: int) -> list[tuple[int, ...]]:
    """The first pages of each run of neighbours that have the same."""
    return [first for first, _ in groupby(tuple(r.pages[:pages]) for r in requests)]


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), max_size=40))
def test_side_by_side(held: list[list[int]]) -> None:
    """With as many pages as a power of two in common, and other requests in other runs."""
    requests = [holding(*pages) for pages in held]
    found = neighbours(requests)
    assert sorted(map(id, found)) == sorted(map(id, requests))
    runs = begins(found, 1)
    assert len(set(runs)) == len(runs)
    # Some of the pages decide: those that agree in them are side by side
    for deciding in ((0, 1), (0, 1, 3), (0, 1, 3, 7)):
        whole = [r for r in found if len(r.pages) > deciding[-1]]
        if len(whole) == len(found):
            keys = [key for key, _ in groupby(tuple(r.pages[i] for i in deciding) for r in found)]
            assert len(set(keys)) == len(keys)


def test_the_order_of_runs_is_that_of_their_first_requests() -> None:
    requests = [holding(7, 1), holding(3, 2), holding(7, 4), holding(5, 3), holding(3, 1)]
    assert [r.pages[0] for r in neighbours(requests)] == [7, 7, 3, 3, 5]


def test_who_has_nothing_in_common_stays() -> None:
    requests = [holding(7, 1), holding(3, 1), holding(5, 1)]
    assert neighbours(requests) is requests
    assert neighbours([]) == []


def test_a_retracted_request_has_another_place() -> None:
    a, b, c = holding(1, 2), holding(1, 3), holding(1, 2)
    assert neighbours([a, b, c]) == [a, c, b]
    a.branch = None  # as by `Memory.release`
    a.pages = [1, 3]
    assert neighbours([a, b, c]) == [c, a, b]
