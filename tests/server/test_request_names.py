"""Clients' names of requests."""

from __future__ import annotations

import pytest

from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.request_names import Names, RequestNames, check_rid


def test_a_name_finds_only_its_own() -> None:
    names = RequestNames()
    both = ["a1-0", "a1-1"]
    names.add(Names({"a1": both, "mine": both}))
    names.add(Names({"b2": ["b2"]}))
    assert names.find("mine") == names.find("a1") == ["a1-0", "a1-1"]
    assert names.find("chatcmpl-b2") == names.find("cmpl-b2") == ["b2"]
    for name in ("", "a", "min", "mine2", "chatcmpl-", "a1-0"):
        assert names.find(name) == []


def test_a_running_name_cannot_be_taken() -> None:
    names = RequestNames()
    first = Names({"a1": ["a1"], "mine": ["a1"]})
    names.add(first)
    # SGLang's words, which its clients compare
    with pytest.raises(InvalidRequest, match="Duplicate request ID"):
        names.add(Names({"b2": ["b2"], "mine": ["b2"]}))
    with pytest.raises(InvalidRequest, match="Duplicate request ID"):
        check_rid(["mine", "mine"], 2)
    assert names.find("b2") == []
    names.remove(first)
    names.add(Names({"b2": ["b2"], "mine": ["b2"]}))
    assert names.find("mine") == ["b2"]


def test_a_continued_stream_replaces_its_first_part() -> None:
    names = RequestNames()
    before, now = Names({"mine": ["a1"]}), Names({"mine": ["a1 again"]})
    names.add(before)
    names.add(now, replace=True)
    assert names.find("mine") == ["a1 again"]
    names.remove(before)
    assert names.find("mine") == ["a1 again"]
    names.remove(now)
    assert names.find("mine") == []


def test_requests_of_one_trace_are_found_together() -> None:
    names = RequestNames()
    first = Names({"a1": ["a1-0", "a1-1"]}, "trace", ["a1-0", "a1-1"])
    second = Names({"b2": ["b2"]}, "trace", ["b2"])
    names.add(first)
    names.add(second)
    assert names.find("chatcmpl-trace") == names.find("trace") == ["a1-0", "a1-1", "b2"]
    assert names.find("b2") == ["b2"]
    assert "trace" not in names, "another request may have it, too"
    names.remove(first)
    assert names.find("cmpl-trace") == ["b2"]
    names.remove(second)
    assert names.find("trace") == []
