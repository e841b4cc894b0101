"""Speculative decoding over HTTP: the same answers, for requests of every kind at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support import processes
from support.processes import get_json, post_json

NAMES = "Answer in one word: is Ann older than Bob, if Ann is 31 and Bob is 29?"
BODIES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.9, "seed": 6, "n": 2, "top_p": 0.8},
    {"stop": [" is"]},
    {"logprobs": True, "top_logprobs": 2},
    {"frequency_penalty": 0.5},
    {"min_tokens": 12, "logit_bias": {"40": 3}},
    {"response_format": {"type": "json_object"}},
]


@pytest.fixture(scope="module")
def drafting() -> Iterator[str]:
    """Returns the URL of a worker of the shipped small model with two drafts."""
    with processes.worker(speculative_algorithm="NEXTN", speculative_num_steps=2) as running:
        yield running.url


def answers(url: str) -> list[Any]:
    def answer(fields: dict[str, Any]) -> Any:
        message = {"role": "user", "content": NAMES}
        body = {"model": "mla-small", "messages": [message], "max_tokens": 24, "temperature": 0}
        got = post_json(url + "/v1/chat/completions", body | fields)
        tokens = [
            [part["token"] for part in (choice["logprobs"] or {}).get("content", [])]
            for choice in got["choices"]
        ]
        texts = [
            (choice["message"]["content"], choice["finish_reason"]) for choice in got["choices"]
        ]
        return texts, tokens, got["usage"]["completion_tokens"]

    with ThreadPoolExecutor(len(BODIES)) as pool:
        return list(pool.map(answer, BODIES))


def test_answers_are_the_same_and_drafts_are_accepted(drafting: str, small_worker: str) -> None:
    assert answers(drafting) == answers(small_worker)
    info = get_json(drafting + "/get_server_info")
    (state,) = info["internal_states"]
    assert 1 < state["avg_spec_accept_length"] <= 3
    assert state["accepted_tokens"] > 20
