# /// script
# dependencies = ["anthropic==2.12.0"]
# ///
"""Anthropic's own package: whole answers, streams, tools, schemas, counts, errors."""

from __future__ import annotations

import json

import anthropic
from checks import KEY, Server, main

MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]
GREEDY = {"extra_body": {"temperature": 0}}  # this version of the package has no such argument
TOOL = {
    "name": "set_light",
    "description": "Switch a light",
    "input_schema": {
        "type": "object",
        "properties": {"room": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}},
        "required": ["room", "on"],
        "additionalProperties": False,
    },
}


def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=120)


def one_message(server: Server) -> None:
    message = client(server).messages.create(
        model=server.model, max_tokens=32, system="You are brief.", messages=MESSAGES
    )
    assert message.id.startswith("msg_")
    assert (message.role, message.model) == ("assistant", server.model)
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.content[0].text
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0


def a_stream_says_what_the_whole_says(server: Server) -> None:
    asked = {"model": server.model, "max_tokens": 24, "messages": MESSAGES, **GREEDY}
    whole = client(server).messages.create(**asked)
    with client(server).messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def a_tool_that_must_be_called(server: Server) -> None:
    asked = {
        "model": server.model,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "Light in the hall, please."}],
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "set_light"},
        **GREEDY,
    }
    message = client(server).messages.create(**asked)
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert set(call.input) == {"room", "on"}
    with client(server).messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.content[-1].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    answer = client(server).messages.create(
        model=server.model,
        max_tokens=8,
        tools=[TOOL],
        messages=[
            *asked["messages"],
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ],
    )
    assert answer.role == "assistant"


def a_schema(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"verdict": {"enum": ["yes", "no"]}},
        "required": ["verdict"],
        "additionalProperties": False,
    }
    message = client(server).messages.create(
        model=server.model,
        max_tokens=600,  # with all blanks that a grammar allows between its tokens
        messages=MESSAGES,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert json.loads(message.content[0].text)["verdict"] in ("yes", "no")


def tokens_are_counted(server: Server) -> None:
    asked = {"model": server.model, "messages": MESSAGES, "tools": [TOOL]}
    counted = client(server).messages.count_tokens(**asked).input_tokens
    usage = client(server).messages.create(**asked, max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def errors_are_of_their_types(server: Server) -> None:
    for kind, fields in (
        (anthropic.NotFoundError, {"model": "missing"}),
        (anthropic.BadRequestError, {"max_tokens": 0}),
    ):
        for streams in (False, True):
            error = refusal(server, fields, streams=streams)
            assert isinstance(error, kind), error
            assert error.body["error"]["message"]


def refusal(server: Server, fields: dict[str, object], *, streams: bool) -> anthropic.APIError:
    asked = {"model": server.model, "max_tokens": 4, "messages": MESSAGES} | fields
    try:
        client(server).messages.create(**asked, stream=streams)
    except anthropic.APIError as error:
        return error
    raise AssertionError(f"{fields} was accepted")


main(
    one_message,
    a_stream_says_what_the_whole_says,
    a_tool_that_must_be_called,
    a_schema,
    tokens_are_counted,
    errors_are_of_their_types,
)
