"""Stop strings: the result does not depend on the boundaries of the pieces."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.server.text.stop_strings import StopMatcher
from support.fake_worker import FakeWorker, script
from support.processes import post_json

# Few letters, so that matches and near misses are common.
texts = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def cut_at_first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The definition, one character at a time: the first complete stop string; the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(texts, stop_lists, st.data())
def test_any_split_gives_the_text_cut_at_the_first_stop(
    text: str, stops: tuple[str, ...], data: st.DataObject
) -> None:
    matcher = StopMatcher(stops)
    shown, at = "", 0
    while at < len(text):
        size = data.draw(st.integers(1, len(text) - at))
        shown += matcher.push(text[at : at + size])
        expected, _ = cut_at_first_stop(text, stops)
        assert expected.startswith(shown), "showed a part of a stop string"
        at += size
    if matcher.matched is None:
        shown += matcher.flush()
    assert (shown, matcher.matched) == cut_at_first_stop(text, stops)


@given(texts, stop_lists)
def test_a_kept_stop_string_is_the_end_of_the_text(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops, keep=True)
    shown = "".join(map(matcher.push, text)) + matcher.flush()
    before, matched = cut_at_first_stop(text, stops)
    assert (shown, matcher.matched) == (before + (matched or ""), matched)


@given(texts, stop_lists)
def test_holds_back_no_more_than_it_must(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    if matcher.matched is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_without_stop_strings_text_passes_at_once() -> None:
    matcher = StopMatcher(())
    assert [matcher.push("ab"), matcher.push("c"), matcher.flush()] == ["ab", "c", ""]


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopMatcher(("b",))
    assert [matcher.push("ab"), matcher.push("c"), matcher.flush()] == ["a", "", ""]


def test_what_was_held_back_for_a_stop_string_is_shown_when_the_answer_ends_by_length(
    worker: FakeWorker, backend: tokenizers.Tokenizer
) -> None:
    say = backend.encode("it is the EN", add_special_tokens=False).ids
    body = {"prompt": "a", "max_tokens": len(say), "stop": "END", "cache_salt": script(say=say)}
    (choice,) = post_json(worker.url + "/v1/completions", body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("it is the EN", "length")
