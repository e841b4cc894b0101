"""/v1/messages, by what Anthropic documents of it, over HTTP. Anthropic's client: tests/clients/anthropic_sdk.py."""

from __future__ import annotations

import asyncio
import json
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from support import client
from support.fake_worker import FakeWorker, script
from support.processes import post_json
from support.replay import Event, events_of

TOOL = {
    "name": "get_weather",
    "description": "What it is like outside.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
INPUTS = [{"city": "Zürich 😀"}, {"city": "Oslo"}]
CALLS = (
    "<｜tool▁calls▁begin｜>"
    + "".join(CALL.format(json.dumps(arguments, ensure_ascii=False)) for arguments in INPUTS)
    + "<｜tool▁calls▁end｜>"
)
THINKS = {"thinking": {"type": "adaptive"}}


@pytest.fixture(scope="module")
def body_of(deepseek_worker: FakeWorker, backend: tokenizers.Tokenizer) -> Callable[..., Any]:
    """A body to which the model answers so."""

    def make(answer: str, burst: int = 1, **fields: Any) -> dict[str, Any]:
        ids = backend.encode(answer, add_special_tokens=False).ids
        salt = deepseek_worker.say([*ids, 1], burst=burst, cached=2)  # 1: the EOS token
        body = {"model": "deepseek", "max_tokens": 200, "cache_salt": salt}
        return body | {"messages": [{"role": "user", "content": "Hello!"}]} | fields

    return make


@pytest.fixture(scope="module")
def ask(deepseek_worker: FakeWorker) -> Callable[[dict[str, Any]], Any]:
    return lambda body: post_json(deepseek_worker.url + "/v1/messages", body)


@pytest.fixture(scope="module")
def rendered(deepseek_folder: Path, deepseek_worker: FakeWorker) -> Callable[..., None]:
    """Compare the last prompt with what transformers renders of these messages."""
    reference: Any = transformers.AutoTokenizer.from_pretrained(str(deepseek_folder))

    def compare(messages: list[dict[str, Any]], **fields: Any) -> None:
        options = {"add_generation_prompt": True, "return_dict": False} | fields
        expected = reference.apply_chat_template(messages, **options)
        prompt = deepseek_worker.generates()[-1].prompt
        assert reference.decode(prompt) == reference.decode(expected)
        assert prompt == expected

    return compare


def streamed(worker: FakeWorker, body: dict[str, Any]) -> list[Event]:
    async def run() -> bytes:
        async with (
            client.session() as http,
            http.post(worker.url + "/v1/messages", json=body | {"stream": True}) as response,
        ):
            assert response.status == 200, await response.text()
            return await response.read()

    return events_of(asyncio.run(run()))


def put_together(events: list[Event]) -> dict[str, Any]:
    """The message that a client makes of the events, which must come in the documented order."""
    assert all(event.body["type"] == event.name for event in events)
    assert [event.name for event in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = {}
    open_block: int | None = None
    arguments = ""
    for event in events[:-1]:
        said = event.body
        match event.name:
            case "message_start":
                assert not message
                message = said["message"]
                assert (message["content"], message["stop_reason"]) == ([], None)
            case "content_block_start":
                assert open_block is None
                assert said["index"] == len(message["content"])
                message["content"].append(said["content_block"])
                open_block, arguments = said["index"], ""
            case "content_block_delta":
                assert said["index"] == open_block
                block, delta = message["content"][open_block], said["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "input_json_delta":
                        arguments += delta["partial_json"]
                    case other:
                        raise AssertionError(other)
            case "content_block_stop":
                assert said["index"] == open_block
                if message["content"][open_block]["type"] == "tool_use":
                    message["content"][open_block]["input"] = json.loads(arguments)
                open_block = None
            case "message_delta":
                assert open_block is None
                message |= said["delta"] | {"usage": said["usage"]}
            case other:
                raise AssertionError(other)
    return message


def test_text(ask: Any, body_of: Any, rendered: Any) -> None:
    message = ask(body_of("Good day, 世界!", system="Be nice."))
    assert message.pop("id").startswith("msg_")
    usage = message.pop("usage")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "deepseek",
        "content": [{"type": "text", "text": "Good day, 世界!", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    # Anthropic counts cached tokens separately. The fake scheduler reports two.
    assert usage["cache_read_input_tokens"] == 2
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["input_tokens"] > 2
    assert usage["output_tokens"] > 2
    rendered([{"role": "system", "content": "Be nice."}, {"role": "user", "content": "Hello!"}])


@pytest.mark.parametrize("burst", [1, 3, 1000])
@pytest.mark.parametrize(
    ("answer", "fields"),
    [
        ("Good day, 世界 😀!", {}),
        ("\n\n  def f():", {}),
        (CALLS, {"tools": [TOOL]}),
        ("Hm. Well 😀.</think>\n\nI look. " + CALLS, {"tools": [TOOL]} | THINKS),
        ("Hm. Well 😀.", THINKS),
        ("", {}),
        ("Hello 😀 for END 😀 of it", {"stop_sequences": ["D 😀 o"]}),
        ("Hello 😀 for END 😀 of it", {"max_tokens": 3}),
    ],
    ids=["text", "white space", "calls", "all", "cut reasoning", "nothing", "stopped", "cut"],
)
def test_a_stream_says_the_same(
    deepseek_worker: FakeWorker, ask: Any, body_of: Any, answer: str, fields: Any, burst: int
) -> None:
    body = body_of(answer, burst, **fields)
    whole, together = ask(body), put_together(streamed(deepseek_worker, body))
    for message in (whole, together):
        message.pop("id")
        for block in message["content"]:
            block.pop("id", None)
    assert together == whole


def test_reasoning_text_and_calls(ask: Any, body_of: Any) -> None:
    body = body_of("Hm. Well 😀.</think>\n\nI look. " + CALLS, tools=[TOOL], **THINKS)
    message = ask(body)
    thinking, text, *calls = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm. Well 😀.", "signature": ""}
    assert text["text"].strip() == "I look."
    assert [call["input"] for call in calls] == INPUTS
    assert {(call["type"], call["name"]) for call in calls} == {("tool_use", "get_weather")}
    assert len({call["id"] for call in calls}) == 2
    assert message["stop_reason"] == "tool_use"


def test_reasoning_that_is_not_wanted(ask: Any, body_of: Any) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    message = ask(body_of("Hm.</think>Yes.", thinking=thinking))
    assert [block["type"] for block in message["content"]] == ["text"]


def test_why_it_ended(ask: Any, body_of: Any) -> None:
    answer = "Hello 😀 for END 😀 of it"
    stopped = ask(body_of(answer, stop_sequences=["END"]))
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "END")
    assert stopped["content"][0]["text"] == "Hello 😀 for "
    cut = ask(body_of(answer, max_tokens=2))
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)


def test_a_call_that_was_cut_is_text(ask: Any, body_of: Any) -> None:
    """The call is incomplete, so its text becomes a text block, without loss."""
    cut = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Zür'
    message = ask(body_of(cut, tools=[TOOL]))
    (block,) = message["content"]
    assert block["text"] == 'get_weather{"city": "Zür'
    assert message["stop_reason"] == "end_turn"


def test_a_conversation_with_tools(ask: Any, body_of: Any, rendered: Any) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Where is"}, text("it warm?")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                text("I look."),
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Ulm"}},
                {"type": "tool_use", "id": "t2", "name": "get_weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "id": "t1", "content": "9 C"},  # as SGLang's clients
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [text("Where?")],
                    "is_error": True,
                },
                text("Well?"),
            ],
        },
        {"role": "system", "content": "Be brief."},
    ]
    ask(body_of("x", messages=turns, system=[text("Be"), text("nice.")]))

    def call(name: str, arguments: str) -> dict[str, Any]:
        function = {"name": "get_weather", "arguments": arguments}
        return {"id": name, "type": "function", "function": function}

    rendered(
        [
            {"role": "system", "content": "Be\nnice."},
            {"role": "user", "content": "Where is\nit warm?"},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [call("t1", '{"city":"Ulm"}'), call("t2", "{}")],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "9 C"},
            {"role": "tool", "tool_call_id": "t2", "content": "Error: Where?"},
            {"role": "user", "content": "Well?"},
            {"role": "system", "content": "Be brief."},
        ]
    )


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content, "cache_control": {"type": "ephemeral"}}


def test_an_assistants_last_text_is_continued(ask: Any, body_of: Any, rendered: Any) -> None:
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, t"}]
    message = ask(body_of("wo", messages=turns))
    assert message["content"][0]["text"] == "wo"
    rendered(turns, add_generation_prompt=False, continue_final_message=True)


def test_fields_that_say_how_to_answer(
    deepseek_worker: FakeWorker, ask: Any, body_of: Any, rendered: Any
) -> None:
    ask(body_of("x", temperature=0.5, top_k=7, top_p=0.25, metadata={"user_id": "u"}))
    params = deepseek_worker.generates()[-1].sampling
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 7, 0.25)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    ask(body_of("{}", output_config={"format": {"type": "json_schema", "schema": schema}}))
    assert deepseek_worker.generates()[-1].grammar is not None
    for thinking, rest in (({"type": "disabled"}, False), ({"type": "enabled"}, True)):
        ask(body_of("x", thinking=thinking))
        rendered([{"role": "user", "content": "Hello!"}], thinking=rest)


@pytest.mark.parametrize(
    ("choice", "constrained"),
    [("auto", False), ("none", False), ("any", True), ("tool", True)],
)
def test_tool_choice(
    deepseek_worker: FakeWorker, ask: Any, body_of: Any, choice: str, constrained: bool
) -> None:
    named = {"name": "get_weather"} if choice == "tool" else {}
    body = body_of("x", tools=[TOOL], tool_choice={"type": choice} | named)
    ask(body)
    assert (deepseek_worker.generates()[-1].grammar is not None) == constrained


def test_only_one_call_without_parallel_calls(ask: Any, body_of: Any) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = ask(body_of(CALLS, tools=[TOOL], tool_choice=choice))
    assert [block["type"] for block in message["content"]] == ["tool_use"]


def turn(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": role, "content": [*blocks]}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        (turn({"type": "image", "source": {"type": "url"}}), "messages[1].content[0].type"),
        (turn(text("a"), {"type": "text"}), "messages[1].content[1].text"),
        (turn({"type": "tool_result"}), "messages[1].content[0].tool_use_id"),
        (turn({"type": "tool_use", "id": "a"}), "messages[1].content[0].type"),
        (
            turn({"type": "tool_use", "id": "a", "name": "b"}, role="assistant"),
            "messages[1].content[0].input",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stop": ["a"]}, "stop"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"n": 2}, "n"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": 1}}},
            "output_config.format.schema",
        ),
        (
            {"tools": [TOOL | {"input_examples": [{"city": "Ulm"}]}]},
            "tools[0].input_examples",
        ),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "a"}, "container"),
        ({"context_management": {}}, "context_management"),
    ],
)
def test_refused_by_name(ask: Any, body_of: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(body_of("x", **fields))
    error = json.loads(caught.value.read())["error"]
    assert caught.value.code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param), error


def test_an_error_in_a_stream_has_a_name(deepseek_worker: FakeWorker, body_of: Any) -> None:
    """Anthropic's clients skip events without one."""
    body = body_of("x", cache_salt=script(say=[300], hold_after=1, error="boom"), stream=True)

    async def run() -> bytes:
        async with (
            client.session() as http,
            http.post(deepseek_worker.url + "/v1/messages", json=body) as response,
        ):
            begun = await response.content.readany()
            async with http.post(deepseek_worker.url + "/flush_cache"):
                return begun + await response.read()

    last = events_of(asyncio.run(run()))[-1]
    assert last.name == "error"
    assert last.body["type"] == "error"
    assert last.body["error"]["message"]


def test_count_tokens(deepseek_worker: FakeWorker, ask: Any, body_of: Any) -> None:
    body = body_of("x", system="Be nice.", tools=[TOOL])
    usage = ask(body)["usage"]
    del body["max_tokens"]
    counted = post_json(deepseek_worker.url + "/v1/messages/count_tokens", body)
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted == {"input_tokens": total}
    assert total == len(deepseek_worker.generates()[-1].prompt)
