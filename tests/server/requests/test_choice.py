"""One choice without a server: tokens become text, and stop strings, patterns and stop tokens end it."""

from __future__ import annotations

from typing import Any

import tokenizers

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.generation import FinishReason, Logprobs
from mla_router.worker.messages import Delta
from mla_router.worker.server.requests.choice import Choice, Finish
from mla_router.worker.server.text.detokenizer import Detokenizer
from mla_router.worker.server.text.stop_regex import RegexMatcher, StopPatterns
from mla_router.worker.server.text.stop_strings import StopMatcher

BACKEND = tokenizers.Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
EOS = 1
STOP, LENGTH = FinishReason.STOP.value, FinishReason.LENGTH.value


def choice(
    stop: tuple[str, ...] = (), regex: str = "", stop_ids: frozenset[int] = frozenset(), **more: Any
) -> Choice:
    patterns = StopPatterns.read(regex, "stop_regex")
    return Choice(
        index=3,
        rid="r",
        prompt_tokens=5,
        max_tokens=100,
        detokenizer=Detokenizer(BACKEND, {EOS}),
        matcher=StopMatcher(stop),
        patterns=RegexMatcher(patterns) if patterns else None,
        client_stop_ids=stop_ids,
        **{"keep_stop": False, **more},
    )


def ids_of(text: str) -> list[int]:
    ids: list[int] = BACKEND.encode(text, add_special_tokens=False).ids
    return ids


def test_the_eos_token_ends_the_text_and_is_not_shown() -> None:
    ids = ids_of("one two three")
    output = choice().advance(Delta("r", [*ids, EOS], finish_reason=STOP))
    assert (output.index, output.text, output.shown_ids) == (3, "one two three", ids)
    assert output.token_ids == [*ids, EOS]
    assert output.finish == Finish(STOP, EOS, None)


def test_a_stop_token_of_the_client_is_the_stop_reason() -> None:
    first, *_ = ids = ids_of("one two")
    ended = choice(stop_ids=frozenset({first}), keep_stop=True)
    output = ended.advance(Delta("r", [*ids, first], finish_reason=STOP))
    assert output.finish == Finish(STOP, first, first)
    assert output.shown_ids == [*ids, first], "keep_stop"


def test_a_stop_string_ends_the_choice_within_a_delta() -> None:
    ids = ids_of("one two three four")
    stopped = choice(stop=(" three",))
    output = stopped.advance(Delta("r", ids))
    assert output.text == "one two"
    assert output.finish == Finish(STOP, " three", " three")
    assert len(output.token_ids) < len(ids), "the later tokens are not part of the answer"
    assert stopped.completion_tokens == len(output.token_ids)


def test_an_output_has_the_logprobs_of_its_tokens() -> None:
    ids = ids_of("one two three four")
    scores = Logprobs([-float(token) for token in ids])
    for ends in ({"stop": (" three",)}, {"regex": "three"}):
        output = choice(**ends).advance(Delta("r", ids, scores))
        assert output.logprobs is not None
        assert output.logprobs.logprobs == [-float(token) for token in output.token_ids]
        assert len(output.token_ids) < len(ids)


def test_a_pattern_ends_the_choice_and_stays_in_the_text() -> None:
    output = choice(regex="t[a-z]o").advance(Delta("r", ids_of("one two three")))
    assert output.text == "one two"
    assert output.finish == Finish(STOP, "t[a-z]o", "t[a-z]o")


def test_held_text_is_shown_at_the_end() -> None:
    ids = ids_of("one two")
    unfinished = choice(stop=("two three",))
    assert unfinished.advance(Delta("r", ids)).text == "one "
    output = unfinished.advance(Delta("r", [], finish_reason=LENGTH))
    assert (output.text, output.finish) == ("two", Finish(LENGTH))


def test_token_by_token() -> None:
    ids = ids_of("one two three")
    logprobs = Logprobs(
        [-float(token) for token in ids], [[token] for token in ids], [[0.0]] * len(ids)
    )
    outputs = choice().outputs_of(Delta("r", ids, logprobs), token_by_token=True)
    assert [output.token_ids for output in outputs] == [[token] for token in ids]
    assert [output.logprobs.logprobs for output in outputs if output.logprobs] == [
        [-float(token)] for token in ids
    ]
    assert "".join(output.text for output in outputs) == "one two three"
    stopped = choice(stop=(" two",)).outputs_of(Delta("r", ids), token_by_token=True)
    assert stopped[-1].finish is not None
    assert len(stopped) < len(ids), "no output after the end"
