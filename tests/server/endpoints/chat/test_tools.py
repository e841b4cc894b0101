"""Tools with the openai client: the prompt of the model, and its calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
import transformers

from support.fake_worker import FakeWorker, fake_worker

Asking = Callable[..., dict[str, Any]]

QUESTION: Any = {"role": "user", "content": "Weather in Zürich and Oslo?"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "What it is like outside.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
RENDERED = [
    TOOLS[0],
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
ARGUMENTS = ['{"city": "Zürich 😀"}', '{"city": "Oslo"}', "{}"]
ANSWER = (
    "I look it up. <｜tool▁calls▁begin｜>"
    f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS[0]}<｜tool▁call▁end｜>"
    f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS[1]}<｜tool▁call▁end｜>"
    f"<｜tool▁call▁begin｜>now<｜tool▁sep｜>{ARGUMENTS[2]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
NAMES = ["get_weather", "get_weather", "now"]


@pytest.fixture(scope="module")
def asking(deepseek_worker: FakeWorker, backend: tokenizers.Tokenizer) -> Asking:
    """The arguments of a request to which the model answers so."""

    def ask(answer: str, burst: int = 1, **fields: Any) -> dict[str, Any]:
        ids = backend.encode(answer, add_special_tokens=False).ids
        salt = deepseek_worker.say([*ids, 1], burst=burst)  # 1: the EOS token
        values = {"model": "deepseek", "messages": [QUESTION], "tools": TOOLS} | fields
        return values | {"extra_body": {"cache_salt": salt}}

    return ask


@pytest.fixture(scope="module")
def reference(deepseek_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(deepseek_folder))


def last_prompt(worker: FakeWorker) -> list[int]:
    return list(worker.generates()[-1].prompt)


def test_a_complete_answer(deepseek: openai.OpenAI, asking: Asking) -> None:
    (choice,) = deepseek.chat.completions.create(**asking(ANSWER)).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look it up. "
    calls: Any = choice.message.tool_calls
    assert [call.function.name for call in calls] == NAMES
    assert [call.function.arguments for call in calls] == ARGUMENTS
    assert {call.type for call in calls} == {"function"}
    assert len({call.id for call in calls}) == 3


def test_content_is_null_where_there_are_only_calls(
    deepseek: openai.OpenAI, asking: Asking
) -> None:
    answer = ANSWER.removeprefix("I look it up. ")
    (choice,) = deepseek.chat.completions.create(**asking(answer)).choices
    assert choice.message.content is None
    assert len(choice.message.tool_calls or []) == 3


@pytest.mark.parametrize("burst", [1, 7, 1000])
def test_a_stream(deepseek: openai.OpenAI, asking: Asking, burst: int) -> None:
    chunks = list(deepseek.chat.completions.create(**asking(ANSWER, burst=burst, stream=True)))
    content, calls = "", dict[int, list[Any]]()
    for chunk in chunks:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or []:
            calls.setdefault(call.index, []).append(call)
    assert content == "I look it up. "
    assert list(calls) == [0, 1, 2]
    for index, pieces in calls.items():
        assert (pieces[0].type, pieces[0].function.name) == ("function", NAMES[index])
        assert pieces[0].id.startswith("call_")
        assert all((p.id, p.type, p.function.name) == (None, None, None) for p in pieces[1:])
        assert "".join(piece.function.arguments for piece in pieces) == ARGUMENTS[index]
        assert len(pieces) > 2 or burst > 1, "arguments come while they are written"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"


def test_the_prompt_of_the_model(
    deepseek: openai.OpenAI,
    deepseek_worker: FakeWorker,
    asking: Asking,
    reference: Any,
) -> None:
    """Tools, calls and results, compared with the rendering of transformers."""
    first = deepseek.chat.completions.create(**asking(ANSWER)).choices[0].message
    assert last_prompt(deepseek_worker) == reference.apply_chat_template(
        [QUESTION], tools=RENDERED, add_generation_prompt=True, return_dict=False
    )
    assert "get_weather" in reference.decode(last_prompt(deepseek_worker))
    messages = [
        QUESTION,
        first.model_dump(exclude_unset=True),  # as clients give it back
        *(
            {"role": "tool", "tool_call_id": call.id, "content": "rain"}
            for call in first.tool_calls or []
        ),
        {"role": "user", "content": "So?"},
    ]
    deepseek.chat.completions.create(**asking("Rain.", messages=messages))
    plain = [{k: v for k, v in m.items() if v is not None} for m in messages]
    assert last_prompt(deepseek_worker) == reference.apply_chat_template(
        plain, tools=RENDERED, add_generation_prompt=True, return_dict=False
    )


def test_none_is_as_without_tools(
    deepseek: openai.OpenAI,
    deepseek_worker: FakeWorker,
    asking: Asking,
    reference: Any,
) -> None:
    asked = asking(ANSWER, tool_choice="none")
    (choice,) = deepseek.chat.completions.create(**asked).choices
    assert (choice.message.content, choice.message.tool_calls) == (ANSWER, None)
    assert choice.finish_reason == "stop"
    assert last_prompt(deepseek_worker) == reference.apply_chat_template(
        [QUESTION], add_generation_prompt=True, return_dict=False
    )


def test_one_call_at_most(deepseek: openai.OpenAI, asking: Asking) -> None:
    asked = asking(ANSWER, parallel_tool_calls=False)
    (choice,) = deepseek.chat.completions.create(**asked).choices
    (call,) = choice.message.tool_calls or []
    assert (call.type, call.function.arguments) == ("function", ARGUMENTS[0])


def test_cut_off_by_max_tokens(
    deepseek: openai.OpenAI, asking: Asking, backend: tokenizers.Tokenizer
) -> None:
    part = ANSWER[: ANSWER.index("Oslo")]
    length = len(backend.encode(part, add_special_tokens=False).ids)
    asked = asking(ANSWER, max_tokens=length)
    (choice,) = deepseek.chat.completions.create(**asked).choices
    assert choice.finish_reason == "length"
    assert len(choice.message.tool_calls or []) == 2


def test_a_call_of_a_function_that_there_is_not(deepseek: openai.OpenAI, asking: Asking) -> None:
    (choice,) = deepseek.chat.completions.create(**asking(ANSWER, tools=TOOLS[1:])).choices
    first, second, _ = ARGUMENTS
    shown = f"I look it up. get_weather{first}get_weather{second}"
    assert (choice.message.content, choice.finish_reason) == (shown, "tool_calls")
    assert len(choice.message.tool_calls or []) == 1


def test_a_template_that_knows_no_tools(
    model_folder: Callable[[str], Path], backend: tokenizers.Tokenizer
) -> None:
    """Models with an unknown template use Llama's format: JSON objects are calls."""
    folder = model_folder("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    answer = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
    ids = backend.encode(answer, add_special_tokens=False).ids
    with (
        fake_worker(model_path=str(folder), served_model_name="plain") as worker,
        openai.OpenAI(base_url=worker.url + "/v1", api_key="none") as client,
    ):
        (choice,) = client.chat.completions.create(
            model="plain",
            messages=[QUESTION],
            tools=TOOLS,
            extra_body={"cache_salt": worker.say([*ids, 1])},
        ).choices
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Oslo"}')


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "function": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [named("")]}, "tools[0].function.name"),
        ({"tools": [named("a b")]}, "tools[0].function.name"),
        ({"tools": [named("a\n")]}, "tools[0].function.name"),
        ({"tools": [named("a" * 129)]}, "tools[0].function.name"),
        ({"tools": [named("a"), named("a")]}, "tools[1].function.name"),
        ({"tools": [named(f"f{index}") for index in range(129)]}, "tools"),
        ({"tools": "now"}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": named("other")}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": named("now"), "tools": []}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"messages": [QUESTION, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [QUESTION | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [QUESTION, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ],
)
def test_refusals(
    deepseek: openai.OpenAI, asking: Asking, fields: dict[str, Any], param: str
) -> None:
    asked = asking("x")
    asked["extra_body"] |= fields
    with pytest.raises(openai.BadRequestError) as caught:
        deepseek.chat.completions.create(**asked)
    assert caught.value.param == param


def test_a_tool_that_is_not_offered(deepseek: openai.OpenAI, asking: Asking) -> None:
    """The message has the words of SGLang's router: its tests compare them."""
    asked = asking("x")
    asked["extra_body"] |= {"tool_choice": named("other")}
    with pytest.raises(openai.BadRequestError, match="function 'other' not found in tools"):
        deepseek.chat.completions.create(**asked)
