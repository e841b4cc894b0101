"""Tool calls of the shipped model, through the router."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from support.processes import Running

CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": CITY},
    }
    for name, description in (
        ("get_weather", "Current weather of a city."),
        ("get_time", "Local time of a city."),
    )
]
QUESTION: Any = {"role": "user", "content": "What is the weather in Oslo?"}


@pytest.fixture(scope="module")
def client(small_server: Running) -> Iterator[openai.OpenAI]:
    url = small_server.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, *messages: Any, **fields: Any) -> Any:
    values: dict[str, Any] = {"tools": TOOLS, "temperature": 0.0, "max_tokens": 64} | fields
    return client.chat.completions.create(model="mla-small", messages=messages, **values)


def test_a_call_and_its_result(client: openai.OpenAI) -> None:
    (choice,) = ask(client, QUESTION).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Oslo"},
    )
    result = json.dumps({"sky": "rainy", "degrees": 7})
    tool = {"role": "tool", "tool_call_id": call.id, "content": result}
    (last,) = ask(client, QUESTION, choice.message.model_dump(exclude_none=True), tool).choices
    assert last.finish_reason == "stop"
    assert "rainy" in last.message.content
    assert "7" in last.message.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
    ],
)
def test_a_call_that_must_be_made(
    client: openai.OpenAI, choice: Any, names: set[str], stream: bool
) -> None:
    """Required calls at a high temperature."""
    for seed in range(4):
        message: Any = {"role": "user", "content": "What is 17 + 25?"}
        fields: dict[str, Any] = {"tool_choice": choice, "temperature": 1.5, "seed": seed}
        fields |= {"parallel_tool_calls": False, "max_tokens": 400}
        if stream:
            with client.chat.completions.stream(
                model="mla-small", messages=[message], tools=TOOLS, **fields
            ) as events:
                answer: Any = events.get_final_completion().choices[0]
        else:
            answer = ask(client, message, **fields).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert not answer.message.content
        (call,) = answer.message.tool_calls
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), CITY)


def test_json_or_a_call(client: openai.OpenAI) -> None:
    """`response_format` restricts the answer, but not a call."""
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    fields: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }
    (call,) = ask(client, QUESTION, **fields).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    message: Any = {"role": "user", "content": "What is 17 + 25?"}
    (choice,) = ask(client, message, tools=[], **fields).choices
    assert choice.message.tool_calls is None
    jsonschema.validate(json.loads(choice.message.content), schema)


def test_a_streamed_call_equals_the_complete_one(client: openai.OpenAI) -> None:
    (whole,) = ask(client, QUESTION).choices[0].message.tool_calls
    names, arguments, reasons = [], "", []
    for chunk in ask(client, QUESTION, stream=True):
        reasons.append(chunk.choices[0].finish_reason)
        for call in chunk.choices[0].delta.tool_calls or []:
            names += [call.function.name] if call.function.name else []
            arguments += call.function.arguments
    assert (names, arguments) == ([whole.function.name], whole.function.arguments)
    assert reasons[-1] == "tool_calls"
