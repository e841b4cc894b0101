"""/v1/completions through the openai client."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import tokenizers

from support.fake_worker import FakeWorker, script


def connect(worker: FakeWorker, strict: bool) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=worker.url + "/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=strict,
    )


@pytest.fixture(scope="module")
def client(worker: FakeWorker) -> Iterator[openai.OpenAI]:
    with connect(worker, strict=True) as client:
        yield client


@pytest.fixture(scope="module")
def streaming(worker: FakeWorker) -> Iterator[openai.OpenAI]:
    """The client's own type for a chunk has no null finish_reason, though OpenAI sends it."""
    with connect(worker, strict=False) as client:
        yield client


def test_a_prompt_of_every_kind(client: openai.OpenAI, backend: tokenizers.Tokenizer) -> None:
    """The fake repeats the prompt: the answer shows what arrived."""
    ids = backend.encode("Hello, world", add_special_tokens=False).ids
    with_bos = backend.encode("Hello, world").ids
    prompts: list[Any] = ["Hello, world", ["Hello, world"], ids, [ids]]
    for prompt in prompts:
        expected = with_bos if isinstance(prompt, str) or isinstance(prompt[0], str) else ids
        answer = client.completions.create(
            model="mla-small", prompt=prompt, max_tokens=len(expected)
        )
        assert answer.id.startswith("cmpl-")
        assert answer.object == "text_completion"
        assert answer.choices[0].text == "Hello, world"
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(expected)


def test_several_prompts(
    client: openai.OpenAI, streaming: openai.OpenAI, backend: tokenizers.Tokenizer
) -> None:
    texts = ["one", "two cats", "three 😀", "four"]
    prompts = [backend.encode(text, add_special_tokens=False).ids for text in texts]
    longest = max(map(len, prompts))
    arguments: Any = {
        "model": "mla-small",
        "prompt": prompts,
        "max_tokens": longest,
        "extra_body": {"cache_salt": script(cached=1)},
    }
    answer = client.completions.create(**arguments)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, text in zip(answer.choices, texts, strict=True):
        assert choice.text.startswith(text)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == 4 * longest
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4

    streamed: dict[int, str] = defaultdict(str)
    finished = []
    for chunk in streaming.completions.create(**arguments, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.text
        finished += [choice.index] if choice.finish_reason else []
    assert [streamed[index] for index in range(4)] == [choice.text for choice in answer.choices]
    assert sorted(finished) == [0, 1, 2, 3]


def test_sixteen_tokens_by_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="mla-small", prompt="Hello")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_usage_of_a_stream(streaming: openai.OpenAI) -> None:
    chunks = list(
        streaming.completions.create(
            model="mla-small", prompt="Hello", stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 16
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_logprobs(
    client: openai.OpenAI, streaming: openai.OpenAI, backend: tokenizers.Tokenizer
) -> None:
    ids = backend.encode("Hello, cats 😀", add_special_tokens=False).ids
    arguments: Any = {
        "model": "mla-small",
        "prompt": ids,
        "max_tokens": len(ids),
        "logprobs": 0,
    }
    choice = client.completions.create(**arguments).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [-token / 1024 for token in ids]
    tokens = [backend.decode([token], skip_special_tokens=False) for token in ids]
    assert choice.logprobs.tokens == tokens
    # Tokens that are parts of one character begin where it begins.
    before = [backend.decode(ids[:index]).rstrip("\ufffd") for index in range(len(ids))]
    assert choice.logprobs.text_offset == [len(text) for text in before]

    offsets: list[int] = []
    for chunk in streaming.completions.create(**arguments, stream=True):
        scores = chunk.choices[0].logprobs
        offsets += (scores.text_offset or []) if scores else []
    assert offsets == choice.logprobs.text_offset


def test_more_logprobs_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="mla-small", prompt="Hello", logprobs=5)
    assert caught.value.param == "logprobs"


def test_one_failing_prompt_ends_the_batch(worker: FakeWorker, client: openai.OpenAI) -> None:
    before = len(worker.heard("Abort"))
    with pytest.raises(openai.InternalServerError):
        client.completions.create(
            model="mla-small",
            prompt=[[5, 6], [5], [7, 8]],
            max_tokens=500,
            extra_body={"cache_salt": script(error="no", only=1)},
        )
    worker.wait_heard(lambda w: len(w.heard("Abort")) == before + 2, "the other two are aborted")
