"""Speculative decoding over HTTP: the same answers, for requests of every kind at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support import processes
from support.processes import Running, get_json, post_json

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
def workers() -> Iterator[list[Running]]:
    """The shipped small model, without drafts and with two."""
    drafts = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
    with processes.together(processes.worker(), processes.worker(**drafts)) as running:
        yield running


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


def test_answers_are_the_same_and_drafts_are_accepted(workers: list[Running]) -> None:
    without, with_drafts = (worker.url for worker in workers)
    assert answers(with_drafts) == answers(without)
    info = get_json(with_drafts + "/get_server_info")
    (state,) = info["internal_states"]
    assert 1 < state["avg_spec_accept_length"] <= 3
    assert state["accepted_tokens"] > 20
