"""OpenAI's predicted outputs through the unchanged `openai` client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage

from support import processes

QUESTION = "Answer in one word: is Ann older than Bob, if Ann is 31 and Bob is 29?"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    flags = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 4}
    with (
        processes.worker(**flags) as worker,
        openai.OpenAI(base_url=worker.url + "/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> tuple[str, CompletionUsage]:
    answer = client.chat.completions.create(
        model="mla-small",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=40,
        temperature=0.8,
        seed=3,
        extra_body={"ignore_eos": True},
        **fields,
    )
    assert answer.usage is not None
    return str(answer.choices[0].message.content), answer.usage


def accepted_and_rejected(usage: CompletionUsage) -> tuple[int, int]:
    details = usage.completion_tokens_details
    assert details is not None
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert accepted is not None and rejected is not None
    return accepted, rejected


def test_a_prediction_changes_no_text(client: openai.OpenAI) -> None:
    text, usage = ask(client)
    assert usage.completion_tokens_details is None
    parts = [{"type": "text", "text": text[:50]}, {"type": "text", "text": text[50:]}]
    for content in (text, parts):
        again, usage = ask(client, prediction={"type": "content", "content": content})
        accepted, rejected = accepted_and_rejected(usage)
        assert again == text
        assert usage.completion_tokens == 40
        assert accepted >= 20 and rejected <= 20, usage
    again, usage = ask(client, prediction={"type": "content", "content": "Nothing of this."})
    accepted, rejected = accepted_and_rejected(usage)
    assert again == text
    assert accepted < rejected
    chunks = client.chat.completions.create(
        model="mla-small",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=8,
        prediction={"type": "content", "content": text},
        stream=True,
        stream_options={"include_usage": True},
    )
    (last,) = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert sum(accepted_and_rejected(last)) >= 20


def test_predictions_that_are_refused(client: openai.OpenAI, small_worker: str) -> None:
    for content, message in (
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], "parts of the type text"),
        ("word " * 40_000, "longer than|are more than"),
    ):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            ask(client, prediction={"type": "content", "content": content})
        assert caught.value.param == "prediction.content"
    url = small_worker + "/v1"
    with (
        openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as without,
        pytest.raises(openai.BadRequestError, match="NGRAM") as caught,
    ):
        ask(without, prediction={"type": "content", "content": "Yes."})
    assert (caught.value.param, caught.value.code) == ("prediction", "unsupported_parameter")
