"""Reasoning over HTTP, and the variables of the chat template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
import transformers

from support.fake_worker import FakeWorker
from support.processes import post_json

Asking = Callable[..., dict[str, Any]]

QUESTION: Any = {"role": "user", "content": "1 + 1?"}
ANSWER = "One and one.\n\nThat is two.\n</think>\n\n2"


@pytest.fixture(scope="module")
def reference(deepseek_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(deepseek_folder))


@pytest.fixture(scope="module")
def asking(deepseek_worker: FakeWorker, backend: tokenizers.Tokenizer) -> Asking:
    """Returns the arguments of a request whose answer is `text`."""

    def ask(answer: str, messages: Any = (QUESTION,), **fields: Any) -> dict[str, Any]:
        ids = backend.encode(answer, add_special_tokens=False).ids
        body = {"cache_salt": deepseek_worker.say([*ids, 1])}  # 1: the EOS token
        body |= {"chat_template_kwargs": {"thinking": True}} | fields
        return {"model": "deepseek", "messages": messages, "extra_body": body}

    return ask


def prompt_of(worker: FakeWorker, reference: Any) -> str:
    return str(reference.decode(worker.generates()[-1].prompt))


def test_a_complete_answer(
    deepseek: openai.OpenAI,
    deepseek_worker: FakeWorker,
    asking: Asking,
    reference: Any,
) -> None:
    (choice,) = deepseek.chat.completions.create(**asking(ANSWER)).choices
    assert prompt_of(deepseek_worker, reference).endswith("<｜Assistant｜><think>")
    message: Any = choice.message
    assert message.reasoning_content == "One and one.\n\nThat is two."
    assert message.reasoning == message.reasoning_content, "vLLM's name for it"
    assert (message.content, choice.finish_reason) == ("2", "stop")


def test_a_stream(deepseek: openai.OpenAI, asking: Asking) -> None:
    asked = asking(ANSWER)
    reasoning, content, seen = "", "", []
    for chunk in deepseek.chat.completions.create(**asked, stream=True):
        delta: Any = chunk.choices[0].delta
        if text := getattr(delta, "reasoning_content", None):
            assert delta.reasoning == text, "vLLM's name for it"
            reasoning += text
            seen.append("reasoning")
        if delta.content:
            content += delta.content
            seen.append("content")
    assert (reasoning, content) == ("One and one.\n\nThat is two.", "2")
    assert seen == sorted(seen, reverse=True)
    assert seen.count("reasoning") > 3, "it comes while it is thought"


def test_an_answer_without(
    deepseek: openai.OpenAI,
    deepseek_worker: FakeWorker,
    asking: Asking,
    reference: Any,
) -> None:
    asked = asking("2", chat_template_kwargs={"thinking": False})
    message: Any = deepseek.chat.completions.create(**asked).choices[0].message
    assert prompt_of(deepseek_worker, reference).endswith("<｜Assistant｜></think>")
    assert message.content == "2"
    assert message.reasoning_content is None


def test_not_apart(deepseek: openai.OpenAI, asking: Asking) -> None:
    asked = asking(ANSWER, separate_reasoning=False)
    message: Any = deepseek.chat.completions.create(**asked).choices[0].message
    assert message.content == ANSWER
    assert message.reasoning_content is None


def test_calls_that_it_only_thinks_of_are_not_made(deepseek: openai.OpenAI, asking: Asking) -> None:
    call = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    tools: Any = [{"type": "function", "function": {"name": "now"}}]
    asked = asking(f"Maybe {call}</think>{call}")
    message: Any = deepseek.chat.completions.create(**asked, tools=tools).choices[0].message
    assert message.reasoning_content == f"Maybe {call}"
    assert len(message.tool_calls) == 1


def test_an_answer_is_continued(
    deepseek: openai.OpenAI,
    deepseek_worker: FakeWorker,
    asking: Asking,
    reference: Any,
) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "It is"}]
    asked = asking(" 2", messages=messages, continue_final_message=True)
    assert deepseek.chat.completions.create(**asked).choices[0].message.content == " 2"
    assert prompt_of(deepseek_worker, reference).endswith("</think>It is")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"conversation": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "y" * 5000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"separate_reasoning": "no"}, "separate_reasoning"),
    ],
)
def test_refusals(
    deepseek: openai.OpenAI, asking: Asking, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        deepseek.chat.completions.create(**asking("x", **fields))
    assert caught.value.param == param


def test_effort_opens_the_reasoning(
    deepseek_worker: FakeWorker, backend: tokenizers.Tokenizer
) -> None:
    """As in SGLang: every effort except `none` enables the reasoning of hybrid models."""
    body = {"messages": [{"role": "user", "content": "1 + 1?"}], "max_tokens": 1}
    url = deepseek_worker.url + "/v1/chat/completions"
    for fields, opened in (
        ({"reasoning_effort": "low"}, True),
        ({"reasoning": {"effort": "high"}}, True),
        ({"reasoning": {"enabled": True}}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}}, False),
        ({}, False),
    ):
        post_json(url, body | fields)
        prompt = backend.decode(deepseek_worker.generates()[-1].prompt, skip_special_tokens=False)
        assert prompt.endswith("<think>") == opened, fields


def test_reasoning_can_be_left_out(
    deepseek_worker: FakeWorker, backend: tokenizers.Tokenizer
) -> None:
    ids = backend.encode("<think>Hm.</think>Two.", add_special_tokens=False).ids
    body = {"messages": [{"role": "user", "content": "1 + 1?"}], "include_reasoning": False}
    salt = {"cache_salt": deepseek_worker.say([*ids, 1])}
    answer = post_json(deepseek_worker.url + "/v1/chat/completions", body | salt)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Two.", None)


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_the_tokens_of_reasoning_are_counted(
    deepseek: openai.OpenAI, asking: Asking, backend: tokenizers.Tokenizer, shown: bool, n: int
) -> None:
    thought = "One and one.\n\nThat is two."
    expected = n * len(backend.encode(thought, add_special_tokens=False).ids)
    asked = asking(ANSWER, include_reasoning=shown) | {"n": n}
    whole = deepseek.chat.completions.create(**asked).usage
    options: Any = {"include_usage": True}
    *_, last = deepseek.chat.completions.create(**asked, stream=True, stream_options=options)
    for usage in (whole, last.usage):
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == expected


def test_an_answer_without_reasoning_counts_none(deepseek: openai.OpenAI, asking: Asking) -> None:
    asked = asking("2", chat_template_kwargs={"thinking": False})
    usage = deepseek.chat.completions.create(**asked).usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 0


def test_unsplit_reasoning_is_not_counted(deepseek: openai.OpenAI, asking: Asking) -> None:
    usage = deepseek.chat.completions.create(**asking(ANSWER, separate_reasoning=False)).usage
    assert usage is not None
    assert usage.completion_tokens_details is None
