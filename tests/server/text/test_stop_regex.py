"""Stop patterns, alone and in the endpoints."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import tokenizers

from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.text.stop_regex import WINDOW, RegexMatcher, StopPatterns
from support import client
from support.fake_worker import FakeWorker, script
from support.processes import post_json
from support.replay import stream


def matcher(*patterns: str) -> RegexMatcher:
    stop = StopPatterns.read(list(patterns), "stop_regex")
    assert stop is not None
    return RegexMatcher(stop)


def test_a_match_over_several_pieces() -> None:
    matching = matcher("x{9}", r"\d\d:\d\d")
    assert [matching.push(piece) for piece in ("at ", "1", "2:", "3", "4 h")] == [
        None,
        None,
        None,
        None,
        r"\d\d:\d\d",
    ]


def test_the_beginning_is_the_beginning_of_the_answer() -> None:
    matching = matcher("^b")
    assert matching.push("a" * 2 * WINDOW) is None
    for _ in range(WINDOW + 2):
        assert matching.push("b") is None
    assert matcher("^b").push("b") == "^b"


@pytest.mark.parametrize(
    "pattern", ["(", "", "a" * 257, "(?P<a", "a{2,1}", "(?=a)", "((a{900}){900}){900}"]
)
def test_invalid_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidField) as caught:
        StopPatterns.read([pattern], "stop_regex")
    assert caught.value.body.error.param == "stop_regex"


@pytest.mark.parametrize(
    "patterns", [["(a?b?){900}" * 10], [f"{letter}.{{80}}" for letter in "abcd"]]
)
def test_patterns_that_take_long_at_each_token_are_refused(patterns: list[str]) -> None:
    """RE2 simulates the automaton of the first one for more than a second, at each token."""
    with pytest.raises(InvalidField, match="too complex"):
        StopPatterns.read(patterns, "stop_regex")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"\p{Lu}\p{Ll}+!", "x Äö!"), (".{100}", "x" * 100), (r"[\w.+-]+@[\w-]+\.\w+ ", "a@b.c ")],
)
def test_usual_patterns_are_small_enough(pattern: str, text: str) -> None:
    matching = matcher(pattern)
    assert [matching.push(char) for char in text] == [None] * (len(text) - 1) + [pattern]


@pytest.mark.parametrize("pattern", ["(a|aa)+$", "(.*)*x(.*)*y", "(a{9}){9}c"])
def test_patterns_that_others_search_for_ever(pattern: str) -> None:
    """The time of Python's engine doubles with each character."""
    assert matcher(pattern).push("a" * 1000 + "b") is None


def test_the_answer_ends_with_the_token_that_matches(
    worker: FakeWorker, backend: tokenizers.Tokenizer
) -> None:
    text = "one 2 three 44 five"
    say = backend.encode(text, add_special_tokens=False).ids
    pattern = "[0-9]{2}"
    body = {"prompt": "a", "max_tokens": 500, "stop_regex": ["never", pattern]}
    for burst in (1, 3, 100):
        salt = script(say=say, burst=burst)
        (choice,) = post_json(worker.url + "/v1/completions", body | {"cache_salt": salt})[
            "choices"
        ]
        assert choice["text"].startswith("one 2 three 44"), burst
        assert not choice["text"].endswith("five"), burst
        assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", pattern)
    native = {"text": "a", "sampling_params": {"max_new_tokens": 500, "stop_regex": pattern}}
    answer = post_json(worker.url + "/generate", native | {"cache_salt": script(say=say)})
    assert answer["text"] == choice["text"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}


def test_a_continued_stream_stops_at_the_same_place(
    worker: FakeWorker, backend: tokenizers.Tokenizer
) -> None:
    say = backend.encode("one 2 three 44 five", add_special_tokens=False).ids
    body: dict[str, Any] = {
        "prompt": "a",
        "max_tokens": 500,
        "stop_regex": "[0-9]{2}",
        "cache_salt": script(say=say),
    }

    async def every_cut() -> None:
        async with client.session() as http:
            uncut = await stream(http, worker.url + "/v1/completions", body)
            for cut in range(1, len(uncut.events)):
                given = uncut.after(cut)
                again = await stream(http, worker.url + "/v1/completions", body, continuation=given)
                assert again.data == uncut.data[cut:], cut

    asyncio.run(every_cut())
