"""/v1/responses with the openai client, whose types are the reference."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
import transformers
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from support.client import session
from support.fake_worker import FakeWorker, script

Asking = Callable[..., dict[str, Any]]

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "What it is like outside.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
ARGUMENTS = ['{"city": "Zürich 😀"}', '{"city": "Oslo"}']
CALLS = (
    "<｜tool▁calls▁begin｜>"
    + "".join(
        f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
        for arguments in ARGUMENTS
    )
    + "<｜tool▁calls▁end｜>"
)
THINKING = {"chat_template_kwargs": {"thinking": True}}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def rendered(deepseek_folder: Path, deepseek_worker: FakeWorker) -> Callable[..., bool]:
    """Returns a function that checks the last prompt: it must be the rendering of messages by transformers."""
    reference: Any = transformers.AutoTokenizer.from_pretrained(str(deepseek_folder))

    def compare(messages: list[dict[str, Any]], **fields: Any) -> bool:
        expected = reference.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **fields
        )
        return bool(expected == deepseek_worker.generates()[-1].prompt)

    return compare


def test_text(deepseek: openai.OpenAI, asking: Asking, rendered: Callable[..., bool]) -> None:
    response = deepseek.responses.create(**asking("Good day, 世界!", instructions="Be nice."))
    assert isinstance(response, Response)
    assert response.id.startswith("resp_")
    assert (response.status, response.error, response.incomplete_details) == (
        "completed",
        None,
        None,
    )
    assert response.output_text == "Good day, 世界!"
    (item,) = response.output
    assert item.type == "message"
    assert (item.role, item.status) == ("assistant", "completed")
    assert response.instructions == "Be nice."
    assert response.store is False  # type: ignore[attr-defined]
    assert rendered(
        [{"role": "system", "content": "Be nice."}, {"role": "user", "content": "Hello!"}]
    )
    usage = response.usage
    assert usage is not None
    assert usage.input_tokens_details.cached_tokens == 2
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


@pytest.mark.parametrize("burst", [1, 3, 100])
def test_white_space_before_a_message_is_a_part_of_it(
    deepseek: openai.OpenAI, asking: Asking, burst: int
) -> None:
    text = "\n\n    def f():\n        return 1"
    whole = deepseek.responses.create(**asking(text, burst))
    events = list(deepseek.responses.create(**asking(text, burst), stream=True))
    assert whole.output_text == text
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text
    assert events[-1].response.output_text == text  # type: ignore[union-attr]


def test_a_conversation_of_many_items_is_put_together(
    deepseek: openai.OpenAI, asking: Asking, rendered: Callable[..., bool]
) -> None:
    """So many items that a thread handles them. Consecutive texts of an assistant are one message."""
    items: list[Any] = []
    for number in range(70):
        items.append({"role": "user", "content": str(number)})
        items += [{"role": "assistant", "content": piece} for piece in ("a", "", "b")]
    deepseek.responses.create(**asking("x", input=items))
    expected = []
    for number in range(70):
        expected.append({"role": "user", "content": str(number)})
        expected.append({"role": "assistant", "content": "ab"})
    assert rendered(expected)


def test_items_of_other_servers(
    deepseek: openai.OpenAI, asking: Asking, rendered: Callable[..., bool]
) -> None:
    """A refusal is text, and encrypted reasoning has none."""
    refusal: Any = {"type": "refusal", "refusal": "No."}
    items: list[Any] = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [refusal]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
        {"role": "user", "content": "b"},
    ]
    response = deepseek.responses.create(**asking("x", input=items), text={"verbosity": "medium"})
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "text"
    assert response.text.verbosity == "medium"
    assert rendered(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "No."},
            {"role": "user", "content": "b"},
        ]
    )


def test_defaults_of_clients_are_accepted(deepseek: openai.OpenAI, asking: Asking) -> None:
    """Some fields have no effect."""
    response = deepseek.responses.create(
        **asking("x"),
        store=True,
        metadata={"a": "b"},
        truncation="disabled",
        background=False,
        include=["reasoning.encrypted_content"],
        service_tier="auto",
        text={"format": {"type": "text"}},
        reasoning={"effort": "none"},
        user="u",
    )
    assert response.output_text == "x"
    assert response.metadata == {"a": "b"}


def test_cut_off(deepseek: openai.OpenAI, asking: Asking) -> None:
    response = deepseek.responses.create(**asking("Good day to you all"), max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].type == "message"
    assert response.output[0].status == "incomplete"
    assert response.usage is not None
    assert response.usage.output_tokens == 2


def test_a_conversation_with_calls(
    deepseek: openai.OpenAI, asking: Asking, rendered: Callable[..., bool]
) -> None:
    """The client returns the items of an answer unchanged, followed by the results of the calls."""
    first = deepseek.responses.create(**asking("I look. " + CALLS, tools=[TOOL]))
    message, *calls = first.output
    assert message.type == "message"
    assert first.output_text == "I look. "
    for call, arguments in zip(calls, ARGUMENTS, strict=True):
        assert call.type == "function_call"
        assert (call.name, call.arguments, call.status) == ("get_weather", arguments, "completed")
    assert len({call.call_id for call in calls if call.type == "function_call"}) == 2
    conversation: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        *(item.model_dump(exclude_none=True) for item in first.output),
        *(
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            for call in calls
            if call.type == "function_call"
        ),
        {"role": "user", "content": "So?"},
    ]
    second = deepseek.responses.create(**asking("Rain.", tools=[TOOL], input=conversation))
    assert second.output_text == "Rain."
    functions = [
        {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        for arguments in ARGUMENTS
    ]
    chat = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look. ", "tool_calls": functions},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "rain"},
        {"role": "user", "content": "So?"},
    ]
    function = {key: TOOL[key] for key in ("name", "description", "parameters")}
    assert rendered(chat, tools=[{"type": "function", "function": function}])


def test_a_schema(deepseek: openai.OpenAI, deepseek_worker: FakeWorker, asking: Asking) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    response = deepseek.responses.create(**asking('{"a": 1}', text={"format": form}))
    assert response.output_text == '{"a": 1}'
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    grammar = deepseek_worker.generates()[-1].grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.source)) == ("json_schema", schema)


def test_reasoning(deepseek: openai.OpenAI, asking: Asking, backend: tokenizers.Tokenizer) -> None:
    response = deepseek.responses.create(**asking("Hm. Well.</think>\n\nYes.", extra=THINKING))
    thought, message = response.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert [part.text for part in thought.content] == ["Hm. Well."]
    assert (message.type, response.output_text) == ("message", "Yes.")
    assert response.usage is not None
    tokens = len(backend.encode("Hm. Well.", add_special_tokens=False).ids)
    assert response.usage.output_tokens_details.reasoning_tokens == tokens
    again: list[Any] = [item.model_dump(exclude_none=True) for item in response.output]
    question: Any = {"role": "user", "content": "?"}
    asked = asking("Yes.", input=[question, *again, question])
    assert deepseek.responses.create(**asked).output_text == "Yes."


def kinds(events: list[Any]) -> list[str]:
    """Returns the types of events; consecutive deltas of one kind count as one."""
    types = [event.type.removeprefix("response.") for event in events]
    return [kind for kind, _ in itertools.groupby(types)]


ITEM = ["output_item.added", "content_part.added"]
DONE = ["content_part.done", "output_item.done"]
CALL = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


@pytest.mark.parametrize("burst", [1, 9, 1000])
def test_a_stream(deepseek: openai.OpenAI, asking: Asking, burst: int) -> None:
    asked = asking("Hm.</think>I look." + CALLS, burst, THINKING, tools=[TOOL])
    whole = deepseek.responses.create(**asked)
    events = list(deepseek.responses.create(**asked, stream=True))
    for event in events:
        EVENT.validate_python(event.model_dump(), strict=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    thought = [*ITEM, "reasoning_text.delta", "reasoning_text.done", *DONE]
    said = [*ITEM, "output_text.delta", "output_text.done", *DONE]
    expected = ["created", "in_progress", *thought, *said, *CALL, *CALL, "completed"]
    assert kinds(events) == expected
    last = events[-1]
    assert last.type == "response.completed"

    def anonymous(response: Response) -> Any:
        items = response.model_dump()["output"]
        return [{**item, "id": None, "call_id": None} for item in items]

    assert anonymous(last.response) == anonymous(whole)
    assert last.response.usage == whole.usage
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    text: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            delta: Any = event
            text[delta.output_index] = text.get(delta.output_index, "") + delta.delta
            assert delta.item_id == done[delta.output_index].id
    assert text == dict(enumerate(["Hm.", "I look.", *ARGUMENTS]))


def test_the_clients_own_accumulation(deepseek: openai.OpenAI, asking: Asking) -> None:
    asked = asking("I look." + CALLS, 3, tools=[TOOL])
    with deepseek.responses.stream(**asked) as stream:
        snapshots = [event for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1].snapshot == "I look."
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]


def test_a_stream_on_the_wire(deepseek_worker: FakeWorker) -> None:
    async def read() -> str:
        url = deepseek_worker.url + "/v1/responses"
        body = {"model": "deepseek", "input": "a", "stream": True, "max_output_tokens": 1}
        async with session() as http, http.post(url, json=body) as response:
            assert response.content_type == "text/event-stream"
            assert response.headers["x-mla-cached-tokens"] == "0"
            return await response.text()

    *blocks, rest = asyncio.run(read()).split("\n\n")
    assert rest == ""
    assert blocks[0].startswith('event: response.created\ndata: {"type":"response.created"')
    assert blocks[-1].startswith("event: response.incomplete\n")


def test_an_error_within_a_stream(deepseek: openai.OpenAI) -> None:
    salt = script(error="broke", hold_after=2)
    stream = deepseek.responses.create(
        model="deepseek", input="x", stream=True, extra_body={"cache_salt": salt}
    )
    events = iter(stream)
    assert next(events).type == "response.created"
    deepseek.post("/../flush_cache", cast_to=object)  # makes the fake scheduler fail
    with pytest.raises(openai.APIError, match="broke"):
        list(events)


MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [MESSAGE, {"type": "item_reference", "id": "x"}]}, "input[1].type"),
        ({"input": [MESSAGE, {"type": "function_call", "name": "x"}]}, "input[1].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"background": True}, "background"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"type": "custom"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"model": "gpt-4o"}, "model"),
    ],
)
def test_refusals(
    deepseek: openai.OpenAI, asking: Asking, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        deepseek.responses.create(**asking("x", extra=fields))
    assert caught.value.status_code in (400, 404)
    body: Any = caught.value.body
    assert body["param"] == param


@pytest.mark.parametrize(
    ("format", "field"),
    [
        ({"type": "json_object"}, "text.format"),
        ({"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "text.format.schema"),
    ],
)
def test_a_format_beside_a_required_call_has_the_name_of_this_endpoint(
    deepseek: openai.OpenAI, asking: Asking, format: dict[str, Any], field: str
) -> None:
    fields = {"tools": [TOOL], "tool_choice": "required", "text": {"format": format}}
    with pytest.raises(openai.BadRequestError, match=rf"cannot be combined with {field}$"):
        deepseek.responses.create(**asking("x", extra=fields))
