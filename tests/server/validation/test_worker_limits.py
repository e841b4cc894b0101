"""Checks against the limits of the worker: the context, priorities, the size of an answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.generation import SamplingParams
from mla_router.worker.messages import Ready
from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.schema.fields import SamplingFields
from mla_router.worker.server.validation.sampling import (
    CheckedSampling,
    NamedNumber,
    check_sampling,
)
from mla_router.worker.server.validation.worker_limits import (
    MAX_PROMPT_LOGPROBS,
    check_priority,
    check_prompt_logprobs,
    fit,
)

VOCAB = 1000


def sampling(max_tokens: int | None) -> CheckedSampling:
    number = NamedNumber("max_tokens", max_tokens)
    return check_sampling(SamplingFields(), max_tokens=number, vocab_size=VOCAB)


def limits(context: int, total: int) -> Ready:
    return Ready(total, 16, 8, context, VOCAB, "cpu", "float32", "float32", "torch")


@pytest.mark.parametrize("given", [None, 0, 1, 7, 100, -100])
def test_priorities_within_the_limits(given: int | None) -> None:
    check_priority(given, enabled=True)


@pytest.mark.parametrize(("given", "enabled"), [(101, True), (-101, True), (1, False)])
def test_refused_priorities(given: int, enabled: bool) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_priority(given, enabled=enabled)
    assert caught.value.body.error.param == "priority"


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 60), st.none() | st.integers(1, 60))
def test_a_request_that_passes_fits(
    context: int, total: int, prompt: int, max_tokens: int | None
) -> None:
    room = min(context, total) - prompt
    try:
        granted = fit(sampling(max_tokens), prompt, limits(context, total), default=None)
    except InvalidRequest as error:
        assert room < (max_tokens or 1)
        assert str(prompt) in str(error)
        assert str(min(context, total)) in str(error)
    else:
        assert 1 <= granted <= room
        assert granted == (room if max_tokens is None else max_tokens)


def test_max_tokens_may_take_all_the_room() -> None:
    assert fit(sampling(40), 10, limits(50, 60), default=None) == 40
    with pytest.raises(InvalidRequest):
        fit(sampling(41), 10, limits(50, 60), default=None)


@pytest.mark.parametrize(
    ("max_tokens", "total", "words"),
    [
        (
            None,
            60,
            r"The input \(50 tokens\) is longer than the model's context length \(50 tokens\)",
        ),
        (
            None,
            40,
            r"longer than the model's context length \(40 tokens, the size of the KV cache\)",
        ),
        (
            9,
            60,
            r"This model's maximum context length is 50 tokens\. However, 50 prompt tokens and",
        ),
        (9, 40, r"maximum context length is 40 tokens, the size of the KV cache\. However"),
    ],
)
def test_clients_recognize_a_long_conversation(
    max_tokens: int | None, total: int, words: str
) -> None:
    """LiteLLM and agents shorten the conversation if they find OpenAI's or SGLang's words in the message."""
    with pytest.raises(InvalidRequest, match=words):
        fit(sampling(max_tokens), 50, limits(50, total), default=None)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [(49, 2, "max_tokens"), (50, 2, "input"), (50, None, "input"), (90, 10**6, "input")],
)
def test_the_longer_field_is_named(prompt: int, max_tokens: int | None, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        fit(sampling(max_tokens), prompt, limits(50, 60), None, "input")
    assert caught.value.body.error.param == param


def test_log_probabilities_of_prompts_have_a_limit() -> None:
    params = SamplingParams(max_tokens=1, top_logprobs=20, prompt_logprobs_from=1)
    most = MAX_PROMPT_LOGPROBS // 21
    check_prompt_logprobs(params, [1, most + 1], "prompt")
    with pytest.raises(InvalidRequest, match="fewer prompts") as caught:
        check_prompt_logprobs(params, [2, most + 1], "prompt")
    assert caught.value.body.error.param == "prompt"
    check_prompt_logprobs(sampling(5).params, [10**9], "prompt")


def test_a_default_gives_way() -> None:
    assert fit(sampling(None), 10, limits(100, 100), default=16) == 16
    assert fit(sampling(None), 90, limits(100, 100), default=16) == 10
