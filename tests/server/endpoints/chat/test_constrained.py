"""The grammars of chat answers, checked with xgrammar."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import openai
import pytest

from mla_router.worker.messages import Grammar
from mla_router.worker.server.endpoints.chat.constraint import constraint_of
from mla_router.worker.server.endpoints.chat.tools import ToolUse
from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.text.tool_calls.deepseek import DEEPSEEK_V31
from mla_router.worker.server.validation.constraint import Constraint
from support.answers import accepts
from support.fake_worker import FakeWorker, fake_worker

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
NUMBER = Constraint(Grammar("json_schema", '{"type": "integer"}'), "response_format")
FUNCTIONS = {"get_weather": SCHEMA, "get_time": SCHEMA}
tool_use = partial(ToolUse, None, FUNCTIONS, schema_fields=dict.fromkeys(FUNCTIONS, "tools"))
CALL = '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'
CALLS = f"<｜tool▁calls▁begin｜>{CALL}<｜tool▁calls▁end｜>"
TWO = f"<｜tool▁calls▁begin｜>{CALL}{CALL}<｜tool▁calls▁end｜>"
OTHER = CALLS.replace('"Oslo"', "5").replace("get_weather", "get_time")
WRONG = CALLS.replace('"Oslo"', "5")
THOUGHT = "It may be 5, or {.</think>\n\n"


@pytest.mark.parametrize(
    ("asked", "tools", "inside", "accepted"),
    [
        (None, tool_use(required=True), False, [CALLS, TWO]),
        (None, tool_use(required=True, several=False), False, [CALLS]),
        (None, tool_use(required=True), True, [THOUGHT + CALLS, THOUGHT + TWO]),
        (NUMBER, tool_use(), False, ["17", CALLS, TWO]),
        (NUMBER, ToolUse(), False, ["17"]),
        (NUMBER, ToolUse(), True, [THOUGHT + "17"]),
        (NUMBER, tool_use(), True, [THOUGHT + "17", THOUGHT + CALLS, THOUGHT + TWO]),
    ],
)
def test_sentences(
    asked: Constraint | None, tools: ToolUse, inside: bool, accepted: list[str]
) -> None:
    constraint = constraint_of(asked, tools, DEEPSEEK_V31, {}, inside=inside)
    assert constraint is not None
    accept = accepts({"type": "structural_tag", "format": constraint.format})
    texts = ["17", CALLS, TWO, WRONG, OTHER, "text", "17" + CALLS, "", CALLS[:-1]]
    for text in [*texts, *(THOUGHT + text for text in texts)]:
        assert accept(text) == (text in accepted), text


def test_strict_functions_in_free_text() -> None:
    tools = tool_use(strict=frozenset({"get_weather"}))
    constraint = constraint_of(None, tools, DEEPSEEK_V31, {}, inside=False)
    assert constraint is not None
    accept = accepts({"type": "structural_tag", "format": constraint.format})
    for text in ("", "17", "text", CALLS, TWO, "text" + CALLS, OTHER):
        assert accept(text), text
    for text in (WRONG, "text" + WRONG, CALLS[:-1], CALLS.replace("get_weather", "get_rich")):
        assert not accept(text), text


def test_nothing_is_asked() -> None:
    assert constraint_of(None, tool_use(), DEEPSEEK_V31, {}, inside=True) is None
    asked = replace(NUMBER, inner_fields=("tools", "tools"))
    assert constraint_of(NUMBER, tool_use(), None, {}, inside=False) == asked


def test_a_schema_that_is_no_json() -> None:
    asked = Constraint(Grammar("json_schema", "{"), "json_schema")
    for tools, inside in (tool_use(), False), (ToolUse(), True):
        with pytest.raises(InvalidRequest, match="json_schema: not valid JSON"):
            constraint_of(asked, tools, DEEPSEEK_V31, {}, inside=inside)


def test_a_call_and_an_answer_at_once() -> None:
    with pytest.raises(InvalidRequest, match="response_format"):
        constraint_of(NUMBER, tool_use(required=True), DEEPSEEK_V31, {}, inside=False)


TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in FUNCTIONS
]
QUESTION: Any = {"role": "user", "content": "?"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", list(FUNCTIONS)),
        ({"type": "function", "function": {"name": "get_time"}}, ["get_time"]),
    ],
)
def test_the_request_to_the_scheduler(
    deepseek: openai.OpenAI, deepseek_worker: FakeWorker, choice: Any, names: list[str]
) -> None:
    deepseek.chat.completions.create(
        model="deepseek", messages=[QUESTION], tools=TOOLS, tool_choice=choice, max_tokens=1
    )
    grammar = deepseek_worker.generates()[-1].grammar
    assert grammar is not None
    assert grammar.kind == "structural_tag"
    accept = accepts(json.loads(grammar.source))
    for name in FUNCTIONS:
        assert accept(CALLS.replace("get_weather", name)) == (name in names)


def test_without_a_format_of_calls() -> None:
    with fake_worker(tool_call_parser="none") as worker:
        client = openai.OpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="mla-small", messages=[QUESTION], tools=TOOLS, tool_choice="required"
            )
        assert caught.value.param == "tool_choice"
