"""/v1/completions with the openai client."""

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
    """OpenAI sends null as finish_reason and as the logprob of a prompt's first token, but the client's types allow
    neither."""
    with connect(worker, strict=False) as client:
        yield client


def test_a_prompt_of_every_kind(client: openai.OpenAI, backend: tokenizers.Tokenizer) -> None:
    """The fake scheduler repeats the prompt, so the answer shows it."""
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
    # Tokens of one character have the offset of this character.
    before = [backend.decode(ids[:index]).rstrip("\ufffd") for index in range(len(ids))]
    assert choice.logprobs.text_offset == [len(text) for text in before]

    offsets: list[int] = []
    for chunk in streaming.completions.create(**arguments, stream=True):
        scores = chunk.choices[0].logprobs
        offsets += (scores.text_offset or []) if scores else []
    assert offsets == choice.logprobs.text_offset


def texts_of(backend: tokenizers.Tokenizer, ids: list[int]) -> list[str]:
    return [backend.decode([token], skip_special_tokens=False) for token in ids]


def likeliest(backend: tokenizers.Tokenizer, token: int, count: int) -> dict[str, float]:
    """The most likely tokens of the fake scheduler: the next ones in the vocabulary."""
    near: dict[str, float] = {}
    for rank, text in enumerate(texts_of(backend, [token + rank for rank in range(count)])):
        near.setdefault(text, -rank / 8)
    return near


@pytest.mark.parametrize("count", [1, 5])
def test_likely_tokens(client: openai.OpenAI, backend: tokenizers.Tokenizer, count: int) -> None:
    ids = backend.encode("Hello, cats 😀", add_special_tokens=False).ids
    (choice,) = client.completions.create(
        model="mla-small", prompt=ids, max_tokens=len(ids), logprobs=count
    ).choices
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs == [likeliest(backend, token, count) for token in ids]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("max_tokens", "skip"), [(0, True), (1, True), (3, True), (3, False)])
def test_echo_with_logprobs(
    streaming: openai.OpenAI,
    backend: tokenizers.Tokenizer,
    max_tokens: int,
    skip: bool,
    stream: bool,
) -> None:
    """lm-eval requests the likelihood of a given text in this way."""
    ids = backend.encode("Hello, cats 😀").ids
    create: Any = streaming.completions.create
    answer = create(
        model="mla-small",
        prompt=[ids, ids[:1]],
        max_tokens=max_tokens,
        echo=True,
        logprobs=2,
        stream=stream,
        extra_body={"cache_salt": script(say=ids[1:]), "skip_special_tokens": skip},
    )
    # The chunks of a stream add up to the complete answer.
    chunks = [choice for part in answer for choice in part.choices] if stream else answer.choices
    for index, prompt in enumerate((ids, ids[:1])):
        parts = [choice for choice in chunks if choice.index == index]
        shown = prompt + ids[1 : 1 + max_tokens]
        text = backend.decode(shown, skip_special_tokens=skip)
        assert "".join(part.text for part in parts) == text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
        lists: dict[str, list[Any]] = defaultdict(list)
        for part in parts:
            for name, values in part.logprobs.to_dict().items():
                lists[name] += values
        assert lists["tokens"] == texts_of(backend, shown)
        assert lists["token_logprobs"] == [None, *(-token / 1024 for token in shown[1:])]
        assert lists["top_logprobs"] == [
            None,
            *(likeliest(backend, token, 2) for token in shown[1:]),
        ]
        before = [
            backend.decode(shown[:at], skip_special_tokens=skip).rstrip("\ufffd")
            for at in range(len(shown))
        ]
        assert lists["text_offset"] == [len(text) for text in before]
    if not stream:
        assert answer.usage.prompt_tokens == len(ids) + 1
        assert answer.usage.completion_tokens == 2 * max_tokens


def test_echo_of_a_long_prompt(
    client: openai.OpenAI, streaming: openai.OpenAI, backend: tokenizers.Tokenizer
) -> None:
    """The logprobs of so many tokens are formatted in a thread."""
    line = backend.encode("All cats are grey at night. ", add_special_tokens=False).ids
    ids = (line * 100)[:700]
    arguments: Any = {"model": "mla-small", "prompt": ids, "max_tokens": 0, "echo": True}
    (choice,) = client.completions.create(**arguments).choices
    assert choice.text == backend.decode(ids)
    assert choice.logprobs is None
    (choice,) = streaming.completions.create(**arguments, logprobs=0).choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == texts_of(backend, ids)


def test_the_best_of_several(
    worker: FakeWorker, client: openai.OpenAI, backend: tokenizers.Tokenizer
) -> None:
    """The answer with the highest mean logprob is first. For the fake scheduler small ids are likely."""
    answer = client.completions.create(
        model="mla-small",
        prompt=[[70, 71], [80, 81]],
        max_tokens=2,
        n=2,
        best_of=5,
        seed=100,
        extra_body={"cache_salt": script(by_seed=[[90, 95], [91], [20, 30], [92], [10, 39]])},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    best = [backend.decode([10, 39]), backend.decode([20, 30])]
    assert [choice.text for choice in answer.choices] == best * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * 5 * 2
    assert answer.usage.prompt_tokens == 4
    assert all(choice.logprobs is None for choice in answer.choices)
    assert worker.generates()[-1].sampling.logprobs


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": -1}),
        ("logprobs", {"logprobs": True}),
        ("best_of", {"best_of": 0}),
        ("best_of", {"best_of": 1, "n": 2}),
        ("best_of", {"best_of": 65}),
        ("best_of", {"best_of": 33, "prompt": ["a", "b"]}),
        ("best_of", {"best_of": 2, "stream": True}),
        ("n", {"n": 0}),
        ("n", {"n": 33, "prompt": ["a", "b"]}),
        ("suffix", {"suffix": "the end"}),
        ("max_tokens", {"max_tokens": -1, "echo": True}),
        ("echo", {"echo": "yes"}),
    ],
)
def test_bad_requests(client: openai.OpenAI, field: str, fields: dict[str, Any]) -> None:
    body = {"prompt": "Hello", **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/completions", body={"model": "mla-small", **body}, cast_to=object)
    assert caught.value.param == field


def test_one_failing_prompt_ends_the_batch(worker: FakeWorker, client: openai.OpenAI) -> None:
    before = len(worker.generates())
    with pytest.raises(openai.InternalServerError):
        client.completions.create(
            model="mla-small",
            prompt=[[5, 6], [5], [7, 8]],
            max_tokens=500,
            extra_body={"cache_salt": script(error="no", only=1)},
        )

    def aborted(worker: FakeWorker) -> bool:
        others = [asked.rid for asked in worker.generates()[before:] if len(asked.prompt) == 2]
        aborts = worker.received("Abort")
        return len(others) == 2 and all(aborts.count([rid]) == 1 for rid in others)

    worker.wait_for(aborted, "the other two are aborted")
