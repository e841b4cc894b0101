"""The unchanged `openai` client with the router and two workers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from support.processes import Running

QUESTION = "Why does a router that knows the prefix caches of its workers answer sooner? " * 4
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": QUESTION},
]


@pytest.fixture(scope="module")
def client(small_server: Running) -> Iterator[openai.OpenAI]:
    # Without the client's own retries, which would hide errors of the router.
    url = small_server.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return next(iter(client.models.list())).id


def complete(client: openai.OpenAI, model: str, **extra: Any) -> str:
    values: dict[str, Any] = {"prompt": QUESTION, "max_tokens": 24, "temperature": 0.0} | extra
    answer = client.completions.create(model=model, **values)
    assert answer.object == "text_completion"
    return str(answer.choices[0].text)


def test_models_lists_the_small_model(client: openai.OpenAI) -> None:
    (only,) = client.models.list()
    assert (only.id, only.object) == ("mla-small", "model")


def test_streamed_chats_equal_complete_ones(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=24, temperature=0.0
    )
    assert whole.object == "chat.completion"
    assert whole.model == model
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")

    stream = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=24,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert {chunk.object for chunk in (*chunks, last)} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in (*chunks, last)}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == choice.finish_reason
    assert set(reasons[:-1]) == {None}
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_streamed_completions_equal_complete_ones(client: openai.OpenAI, model: str) -> None:
    whole = complete(client, model)
    stream = client.completions.create(
        model=model, prompt=QUESTION, max_tokens=24, temperature=0.0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole
    assert whole


def test_usage_counts_cached_tokens(client: openai.OpenAI, model: str) -> None:
    prompt = "A prompt that no other test sends, long enough to fill some pages. " * 5
    usages = [
        client.completions.create(model=model, prompt=prompt, max_tokens=2).usage for _ in range(2)
    ]
    cold, warm = [usage for usage in usages if usage is not None]
    assert cold.prompt_tokens == warm.prompt_tokens > 16
    assert cold.total_tokens == cold.prompt_tokens + cold.completion_tokens
    assert cold.prompt_tokens_details is not None
    assert warm.prompt_tokens_details is not None
    assert cold.prompt_tokens_details.cached_tokens == 0
    # It goes to the worker with the cached prefix, which computes less than one page of 16 and the last token.
    assert warm.prompt_tokens_details.cached_tokens is not None
    assert warm.prompt_tokens - warm.prompt_tokens_details.cached_tokens <= 16


def test_max_tokens_ends_by_length(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=QUESTION, max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_string_ends_the_text_before_it(
    client: openai.OpenAI, model: str, streamed: bool
) -> None:
    free = complete(client, model, max_tokens=40)
    stop = free[len(free) // 2 :][:3]  # in the middle of the text
    expected = free[: free.index(stop)]
    if streamed:
        chunks = list(
            client.completions.create(
                model=model,
                prompt=QUESTION,
                max_tokens=40,
                temperature=0.0,
                stop=[stop, "never said"],
                stream=True,
            )
        )
        text = "".join(chunk.choices[0].text for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        answer = client.completions.create(
            model=model, prompt=QUESTION, max_tokens=40, temperature=0.0, stop=stop
        )
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert text == expected
    assert reason == "stop"


def test_a_seed_fixes_the_text_beside_other_requests(client: openai.OpenAI, model: str) -> None:
    def sample(seed: int) -> str:
        return complete(client, model, max_tokens=16, temperature=2.0, seed=seed)

    alone = sample(7)
    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(sample, [7 if i % 3 == 0 else 100 + i for i in range(24)]))
    assert [text for i, text in enumerate(texts) if i % 3 == 0] == [alone] * 8
    assert len(set(texts)) > 12  # different seeds give different texts


def test_a_bias_forces_a_token_and_penalties_end_its_repetition(
    client: openai.OpenAI, model: str
) -> None:
    def tokens(**settings: Any) -> list[str]:
        answer = client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_tokens=8,
            temperature=0.0,
            logprobs=True,
            **settings,
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        return [entry.token for entry in logprobs.content]

    forced = tokens(logit_bias={"300": 100})
    assert len(forced) == 8
    assert len(set(forced)) == 1
    # Among equally biased tokens the model repeats some, which the penalties prevent.
    many = {str(token): 100 for token in range(300, 400)}
    plain = tokens(logit_bias=many)
    varied = tokens(logit_bias=many, presence_penalty=2.0, frequency_penalty=2.0)
    assert len(set(varied)) > len(set(plain)), (plain, varied)


def test_chat_logprobs_of_the_sampled_tokens(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=4, temperature=0.0, logprobs=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    assert all(entry.logprob <= 0.0 for entry in logprobs.content)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 10_000_000),
        ("temperature", -1.0),
        ("top_p", 2.0),
        ("n", 0),
        ("stop", 7),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("logit_bias", {"50256000": 1}),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(
    client: openai.OpenAI, model: str, field: str, value: object
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, model, **{field: value})
    assert caught.value.param == field, caught.value.body
    assert caught.value.type == "invalid_request_error"
    assert complete(client, model, max_tokens=1) is not None  # other requests still work


def test_an_unknown_model_and_an_unknown_path_are_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        complete(client, "no-such-model")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="no such path here")


def test_several_answers(client: openai.OpenAI, model: str) -> None:
    arguments: dict[str, Any] = {"messages": MESSAGES, "n": 3, "seed": 7, "max_tokens": 12}
    first = client.chat.completions.create(model=model, **arguments)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3, "each choice has a seed of its own"
    again = client.chat.completions.create(model=model, **arguments)
    assert [choice.message.content for choice in again.choices] == texts
    alone = client.chat.completions.create(model=model, **arguments | {"n": 1})
    assert alone.choices[0].message.content == texts[0], "the first has the request's own seed"
    other = client.chat.completions.create(model=model, **arguments | {"seed": 8})
    # The choices of similar seeds have different seeds. Likely answers may still be equal.
    assert [choice.message.content for choice in other.choices][:2] != texts[1:]
    assert first.usage is not None
    assert alone.usage is not None
    assert first.usage.prompt_tokens == alone.usage.prompt_tokens, "the prompt counts once"


def test_responses_equal_chats(client: openai.OpenAI, model: str) -> None:
    chat = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=24, temperature=0.0
    )
    arguments: dict[str, Any] = {
        "input": QUESTION,
        "instructions": MESSAGES[0]["content"],
        "max_output_tokens": 24,
        "temperature": 0.0,
    }
    whole = client.responses.create(model=model, **arguments)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage is not None
    assert chat.usage is not None
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    events = list(client.responses.create(model=model, stream=True, **arguments))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert "".join(deltas) == last.response.output_text == whole.output_text
    assert last.response.status == whole.status
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens
