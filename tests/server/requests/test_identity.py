"""Ids of answers and choices, and the names by which clients abort them."""

from __future__ import annotations

from mla_router.worker.server.requests.identity import RequestIdentity
from mla_router.worker.server.requests.replay import Origin

ORIGIN = Origin(bytes(range(16)), 1_700_000_000, "fp_0123456789", 7, 0)
ID = "000102030405060708090a0b0c0d0e0f"


def test_generated_ids() -> None:
    one, two = RequestIdentity(ORIGIN, 1), RequestIdentity(ORIGIN, 2)
    assert one.answer_id("cmpl-") == f"cmpl-{ID}"
    assert one.choice_id(0) == ID
    assert [two.choice_id(index) for index in range(2)] == [f"{ID}-0", f"{ID}-1"]
    assert two.names(["a", "b"]).own == {ID: ["a", "b"]}


def test_one_name_of_the_client() -> None:
    identity = RequestIdentity(ORIGIN, 2, "mine")
    assert identity.answer_id("cmpl-") == "mine"
    assert [identity.choice_id(index) for index in range(2)] == ["mine-0", "mine-1"]
    assert identity.names(["a", "b"]).own == {ID: ["a", "b"], "mine": ["a", "b"]}


def test_a_name_for_each_choice() -> None:
    identity = RequestIdentity(ORIGIN, 2, ["x", "y"])
    assert identity.answer_id("cmpl-") == "x"
    assert [identity.choice_id(index) for index in range(2)] == ["x", "y"]
    assert identity.names(["a", "b"]).own == {ID: ["a", "b"], "x": ["a"], "y": ["b"]}


def test_the_trace_is_the_id_after_the_prefix() -> None:
    identity = RequestIdentity(ORIGIN, 1, trace="trace-1")
    assert identity.answer_id("chatcmpl-") == "chatcmpl-trace-1"
    names = identity.names(["a"])
    assert (names.trace, list(names.rids), names.own) == ("trace-1", ["a"], {ID: ["a"]})


def test_the_envelope() -> None:
    assert RequestIdentity(ORIGIN, 1).envelope("cmpl-", "m") == {
        "id": f"cmpl-{ID}",
        "created": 1_700_000_000,
        "model": "m",
        "system_fingerprint": "fp_0123456789",
    }
