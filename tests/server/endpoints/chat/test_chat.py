"""/v1/chat/completions with the openai client, and properties outside its types."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest
import tokenizers
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mla_router.worker.config import SMALL_MODEL
from support.client import sse_events
from support.fake_worker import FakeWorker, script
from support.processes import post_json

HELLO: Any = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def client(worker: FakeWorker) -> Iterator[openai.OpenAI]:
    # Strict: an answer of other types than OpenAI's raises.
    with openai.OpenAI(
        base_url=worker.url + "/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


def say(backend: tokenizers.Tokenizer, text: str, **fields: Any) -> dict[str, str]:
    ids = backend.encode(text, add_special_tokens=False).ids
    return {"cache_salt": script(say=[*ids, 1], **fields)}  # 1: the EOS token


def test_a_complete_answer(client: openai.OpenAI, backend: tokenizers.Tokenizer) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="mla-small", messages=HELLO, extra_body=say(backend, "Good day, 世界!", cached=2)
    )
    answer = raw.parse()
    assert isinstance(answer, ChatCompletion)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "mla-small"
    assert abs(answer.created - time.time()) < 60
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "Good day, 世界!")

    prompt = backend.encode(
        "<｜begin▁of▁sentence｜><｜User｜>Hello!<｜Assistant｜>", add_special_tokens=False
    ).ids
    said = len(backend.encode("Good day, 世界!", add_special_tokens=False).ids)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == said + 1
    assert answer.usage.total_tokens == len(prompt) + said + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert raw.headers["x-mla-prompt-tokens"] == str(len(prompt))
    assert raw.headers["x-mla-cached-tokens"] == "2"
    assert raw.headers["x-mla-worker"]

    # Strict clients require these fields, even if they are empty.
    body = json.loads(raw.text)
    assert body["system_fingerprint"].startswith("fp_")
    assert body["choices"][0]["message"]["refusal"] is None
    assert body["choices"][0]["message"]["annotations"] == []
    assert "service_tier" not in body


def test_a_stream(client: openai.OpenAI, backend: tokenizers.Tokenizer) -> None:
    stream = client.chat.completions.create(
        model="mla-small",
        messages=HELLO,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=say(backend, "Good day, 世界! 😀", cached=3),
    )
    chunks = list(stream)
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *contents, last, usage = chunks
    assert contents[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in contents[1:])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in contents)
    assert text == "Good day, 世界! 😀"
    assert all(chunk.choices[0].finish_reason is None for chunk in contents)
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.prompt_tokens_details is not None
    assert usage.usage.prompt_tokens_details.cached_tokens == 3
    assert "\ufffd" not in text


def test_a_stream_on_the_wire(worker: FakeWorker, backend: tokenizers.Tokenizer) -> None:
    async def read() -> tuple[aiohttp.ClientResponse, list[str]]:
        body = {"model": "mla-small", "messages": HELLO, "stream": True} | say(backend, "a b")
        async with aiohttp.ClientSession() as http:
            response = await http.post(worker.url + "/v1/chat/completions", json=body)
            return response, [event async for event in sse_events(response)]

    response, events = asyncio.run(read())
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-mla-cached-tokens"] == "0"
    assert events[-1] == "[DONE]"
    bodies = [json.loads(event) for event in events[:-1]]
    assert bodies[0]["choices"][0]["delta"] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": None,
    }
    assert bodies[-1]["choices"][0]["delta"] == {"reasoning_content": None}
    assert all("usage" not in body for body in bodies), "nobody asked for usage"


@pytest.mark.parametrize("burst", [1, 3, 50])
@pytest.mark.parametrize("stop", [["wor"], [", w", "xx"], "ld", ["zzz", "lo, world!"]])
def test_stop_strings(
    worker: FakeWorker,
    client: openai.OpenAI,
    backend: tokenizers.Tokenizer,
    stop: str | list[str],
    burst: int,
) -> None:
    text = "Hello, world! And so on."
    # The fake scheduler would wait for ever: only the stop string ends the request.
    held = len(backend.encode(text, add_special_tokens=False).ids)
    first = min(text.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in text)
    arguments: Any = {
        "model": "mla-small",
        "messages": HELLO,
        "stop": stop,
        "extra_body": say(backend, text, burst=burst, hold_after=held),
    }
    answer = client.chat.completions.create(**arguments)
    assert answer.choices[0].message.content == text[:first]
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**arguments, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == text[:first]
    assert chunks[-1].choices[0].finish_reason == "stop"
    rid = answer.id.removeprefix("chatcmpl-")
    worker.wait_for(lambda w: w.received("Abort").count([rid]) == 1, "the rest is not computed")


def test_length(client: openai.OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        arguments: Any = {name: 3}
        answer = client.chat.completions.create(model="mla-small", messages=HELLO, **arguments)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_has_at_least_one_token(client: openai.OpenAI, name: str) -> None:
    """As in OpenAI's API. /v1/completions accepts 0, for only the prompt."""
    arguments: Any = {name: 0}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="mla-small", messages=HELLO, **arguments)
    assert caught.value.param == name


def test_logprobs(client: openai.OpenAI, backend: tokenizers.Tokenizer) -> None:
    text = "Hello 😀"
    ids = backend.encode(text, add_special_tokens=False).ids
    arguments: Any = {
        "model": "mla-small",
        "messages": HELLO,
        "logprobs": True,
        "extra_body": say(backend, text),
    }
    whole = client.chat.completions.create(**arguments).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    # The EOS token is not a part of the answer.
    assert [entry.logprob for entry in whole.content] == [-token / 1024 for token in ids]
    assert b"".join(bytes(entry.bytes or []) for entry in whole.content).decode() == text
    assert all(entry.top_logprobs == [] for entry in whole.content)

    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**arguments, stream=True):
        scores = chunk.choices[0].logprobs
        streamed += (scores.content or []) if scores else []
    assert streamed == whole.content


def test_top_logprobs(client: openai.OpenAI, backend: tokenizers.Tokenizer) -> None:
    """The fake scheduler gives token t + k the logprob -k/8 beside token t."""
    ids = backend.encode("Hello 😀", add_special_tokens=False).ids
    arguments: Any = {
        "model": "mla-small",
        "messages": HELLO,
        "logprobs": True,
        "top_logprobs": 3,
        "extra_body": say(backend, "Hello 😀"),
    }
    scores = client.chat.completions.create(**arguments).choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    for token, entry in zip(ids, scores.content, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == [0, -1 / 8, -2 / 8]
        assert [top.token for top in entry.top_logprobs] == [
            backend.decode([token + rank], skip_special_tokens=False) for rank in range(3)
        ]
    chunks = client.chat.completions.create(**arguments, stream=True)
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [entry for some in streamed for entry in some.content or []] == scores.content


@pytest.mark.parametrize(
    "fields", [{"top_logprobs": 21}, {"top_logprobs": -1}, {"logprobs": False}]
)
def test_top_logprobs_out_of_range(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    values: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} | fields
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="mla-small", messages=HELLO, **values)
    assert caught.value.param == "top_logprobs"


def test_content_in_parts_and_the_developers_role(
    worker: FakeWorker, backend: tokenizers.Tokenizer
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "be nice"},
        {"role": "user", "content": parts},
    ]
    body = {"model": "mla-small", "messages": messages, "max_tokens": 1}
    answer = post_json(worker.url + "/v1/chat/completions", body)
    rid = answer["id"].removeprefix("chatcmpl-")
    (generate,) = [generate for generate in worker.generates() if generate.rid == rid]
    rendered = "<｜begin▁of▁sentence｜>be nice<｜User｜>one\ntwo<｜Assistant｜>"
    assert generate.prompt == backend.encode(rendered, add_special_tokens=False).ids


def test_only_the_served_model_answers(client: openai.OpenAI) -> None:
    """The model is optional. SGLang's clients send `default`, its benchmarks the path of the folder."""
    for name, shown in (
        ("small", "small"),
        (str(SMALL_MODEL), str(SMALL_MODEL)),
        ("default", "mla-small"),
        ("", "mla-small"),
    ):
        answer = client.chat.completions.create(model=name, messages=HELLO, max_tokens=1)
        assert answer.model == shown
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert not_found.value.code == "model_not_found"
    assert not_found.value.param == "model"


def test_an_error_of_the_scheduler_before_the_first_token(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(
                model="mla-small",
                messages=HELLO,
                stream=stream,
                extra_body={"cache_salt": script(error="no room")},
            )
        assert caught.value.status_code == 500
        assert "no room" in str(caught.value)


def test_an_error_within_a_stream_is_an_event(worker: FakeWorker, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="mla-small",
        messages=HELLO,
        stream=True,
        extra_body={"cache_salt": script(error="broke", hold_after=2)},
    )
    chunks = iter(stream)
    assert next(chunks)
    post_json(worker.url + "/flush_cache", {})  # makes the fake scheduler fail
    with pytest.raises(openai.APIError, match="broke"):
        list(chunks)
