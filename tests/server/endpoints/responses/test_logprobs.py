"""Log-probabilities in /v1/responses: only the tokens of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
import tokenizers

INCLUDE = ["message.output_text.logprobs"]
TEXT = "\n\nGood day, 世界! <b"
THOUGHT = "It is day.</think>\n\n"
CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
Asking = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("burst", [1, 100])
@pytest.mark.parametrize(
    ("before", "text", "behind", "fields"),
    [
        ("", TEXT, "", {}),
        (THOUGHT, TEXT.strip(), "", {"extra": {"chat_template_kwargs": {"thinking": True}}}),
        ("", "Let me see.", CALL, {"tools": [TOOL]}),
        ("", "a <｜tool, and no more", "", {"tools": [TOOL]}),
    ],
)
def test_of_a_message(
    deepseek: openai.OpenAI,
    backend: tokenizers.Tokenizer,
    asking: Asking,
    burst: int,
    before: str,
    text: str,
    behind: str,
    fields: dict[str, Any],
) -> None:
    """The fake scheduler gives token t the logprob -t/1024, and token t + k beside it -k/8."""
    asked = asking(before + text + behind, burst, **fields, include=INCLUDE, top_logprobs=2)
    response = deepseek.responses.create(**asked)
    assert response.top_logprobs == 2
    assert response.output_text == text
    (message,) = [item for item in response.output if item.type == "message"]
    (part,) = message.content
    assert part.type == "output_text"
    logprobs = part.logprobs
    assert logprobs is not None
    assert b"".join(bytes(entry.bytes) for entry in logprobs).decode() == text
    for entry in logprobs:
        (token,) = backend.encode(entry.token, add_special_tokens=False).ids[:1]
        assert len(entry.top_logprobs) == 2
        if "\ufffd" not in entry.token:
            assert entry.logprob == -token / 1024

    events = list(deepseek.responses.create(**asked, stream=True))
    streamed = [
        (entry.token, entry.logprob)
        for event in events
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert streamed == [(entry.token, entry.logprob) for entry in logprobs]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [(entry.token, entry.logprob) for entry in done.logprobs] == streamed
    assert events[-1].type == "response.completed"
    (item,) = [item for item in events[-1].response.output if item.type == "message"]
    assert item.content == message.content


def test_not_without_being_asked(deepseek: openai.OpenAI, asking: Asking) -> None:
    (item,) = deepseek.responses.create(**asking("x"), top_logprobs=0).output
    assert item.type == "message"
    assert item.content[0].type == "output_text"
    assert item.content[0].logprobs == []


@pytest.mark.parametrize(
    "fields", [{"top_logprobs": 2}, {"top_logprobs": 21, "include": INCLUDE}, {"top_logprobs": -1}]
)
def test_refused(deepseek: openai.OpenAI, asking: Asking, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        deepseek.responses.create(**asking("x"), **fields)
    assert caught.value.param == "top_logprobs"
