"""The effect of each field of OpenAI's two endpoints, with the `openai` client and the router. Answers are parsed
strictly: a field of another type than OpenAI's is an error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import tokenizers

from mla_router.worker.config import SMALL_MODEL
from support.processes import Running

MODEL = "mla-small"
PROMPT = "The router sends each request to"
MESSAGES: list[Any] = [
    {"role": "developer", "content": "You answer in one sentence."},
    {"role": "user", "content": [{"type": "text", "text": "What is a prefix cache?"}]},
]


def connect(server: Running, *, strict: bool) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=server.url + "/v1",
        api_key="unused",
        max_retries=0,
        _strict_response_validation=strict,
    )


@pytest.fixture(scope="module")
def client(small_server: Running) -> Iterator[openai.OpenAI]:
    with connect(small_server, strict=True) as client:
        yield client


@pytest.fixture(scope="module")
def lenient(small_server: Running) -> Iterator[openai.OpenAI]:
    """Chunks of text completions have a null finish_reason, which the client's type does not allow."""
    with connect(small_server, strict=False) as client:
        yield client


@pytest.fixture(scope="module")
def token() -> int:
    """Returns the token id of a word with one token."""
    backend = tokenizers.Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
    (token,) = backend.encode(" the", add_special_tokens=False).ids
    return token


def sampled(client: openai.OpenAI, **fields: Any) -> Any:
    values: dict[str, Any] = {
        "prompt": PROMPT,
        "max_tokens": 8,
        "seed": 5,
        "extra_body": {"ignore_eos": True},
    }
    return client.completions.create(model=MODEL, **(values | fields))


def mean_logprob(choice: openai.types.CompletionChoice) -> float:
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs
    return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)


def test_n_and_best_of(client: openai.OpenAI) -> None:
    """`best_of` returns the best two of the eight answers that `n` returns."""
    hot = {"prompt": "xq zv", "temperature": 2.0}  # a prompt with many likely answers
    eight = sampled(client, n=8, logprobs=0, **hot)
    assert [choice.index for choice in eight.choices] == list(range(8))
    assert len({choice.text for choice in eight.choices}) > 2
    assert eight.usage is not None
    assert eight.usage.completion_tokens == 8 * 8
    best = sampled(client, n=2, best_of=8, **hot)
    ranked = sorted(eight.choices, key=mean_logprob, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert best.usage is not None
    assert best.usage.completion_tokens == 8 * 8
    assert best.usage.prompt_tokens == eight.usage.prompt_tokens


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_of_a_completion(client: openai.OpenAI, count: int) -> None:
    (choice,) = sampled(client, temperature=0, logprobs=count).choices
    scores = choice.logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert "".join(scores.tokens) == choice.text
    assert scores.text_offset is not None
    for at, token, offset in zip(range(8), scores.tokens, scores.text_offset, strict=True):
        assert choice.text[offset:].startswith(token), (at, offset)
    assert scores.top_logprobs is not None
    for at, top in enumerate(scores.top_logprobs):
        assert len(top) <= max(count, 1), "with 0 there is the token itself"
        assert scores.token_logprobs is not None
        assert top[scores.tokens[at]] == max(top.values()) == scores.token_logprobs[at]


@pytest.mark.parametrize("count", [None, 3])
def test_a_stream_of_several_choices_adds_up(
    client: openai.OpenAI, lenient: openai.OpenAI, count: int | None
) -> None:
    whole = sampled(client, n=2, logprobs=count)
    texts: dict[int, str] = defaultdict(str)
    scores: dict[int, list[Any]] = defaultdict(list)
    for chunk in sampled(lenient, n=2, logprobs=count, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                scores[choice.index] += choice.logprobs.token_logprobs
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        if choice.logprobs is not None:
            assert scores[choice.index] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    assert len(scores) == (0 if count is None else 2)


def test_echo(client: openai.OpenAI) -> None:
    plain, echoed = sampled(client).choices[0].text, sampled(client, echo=True).choices[0].text
    assert echoed == PROMPT + plain
    alone = sampled(client, echo=True, max_tokens=0)
    assert alone.choices[0].text == PROMPT
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0


def test_logit_bias(client: openai.OpenAI, token: int) -> None:
    forced = {"temperature": 0, "logit_bias": {str(token): 100}, "max_tokens": 3}
    assert sampled(client, **forced).choices[0].text == " the the the"
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, **forced)
    assert chat.choices[0].message.content == " the the the"


def test_only_allowed_tokens_are_drawn(lenient: openai.OpenAI) -> None:
    backend = tokenizers.Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
    allowed = [backend.token_to_id(letter) for letter in "xyz"]
    answer: Any = lenient.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=16,
        temperature=2,
        seed=5,
        n=3,
        extra_body={"allowed_token_ids": allowed, "return_token_ids": True},
    )
    for choice in answer.choices:
        assert len(choice.token_ids) == 16, "none of them ends the answer"
        assert set(choice.token_ids) <= set(allowed)


@pytest.mark.parametrize("texts", [["Zürich", "Zürich 😀"], ["x"]])
def test_one_of_several_texts(lenient: openai.OpenAI, texts: list[str]) -> None:
    answer = lenient.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=32,
        n=3,
        extra_body={"structured_outputs": {"choice": texts}},
    )
    assert {choice.message.content for choice in answer.choices} <= set(texts)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_chat_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_completion_tokens=6,
        n=2,
        seed=3,
        temperature=0.9,
        top_p=0.9,
        logprobs=True,
        top_logprobs=4,
        stop=["never said"],
        user="somebody",
        response_format={"type": "text"},
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 4
            logprobs = [top.logprob for top in entry.top_logprobs]
            assert logprobs == sorted(logprobs, reverse=True)
            assert entry.logprob <= logprobs[0] + 1e-6


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/completions", {"best_of": 2, "stream": True}, "best_of"),
        ("/completions", {"logprobs": 21}, "logprobs"),
        ("/completions", {"suffix": "."}, "suffix"),
        ("/chat/completions", {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ("/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/chat/completions", {"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ("/embeddings", {"input": "a"}, "model"),
    ],
)
def test_invalid_values_are_refused_by_name(
    client: openai.OpenAI, path: str, fields: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(path, body=body | fields, cast_to=object)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
