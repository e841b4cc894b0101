"""Calls in all formats are found with any boundaries of the pieces, and no other text is a call."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import xgrammar
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from mla_router.worker.server.text.answer import TOOL_FORMATS
from mla_router.worker.server.text.tool_calls import deepseek, llama3
from support.answers import Found, accepts, parse, template

NAMES = ("get_weather", "add")
WEATHER = {"city": "Zürich 😀", "days": [1, {"}": '"{'}], "note": "a\n```\nb"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def written(format_name: str, *calls: tuple[str, str], content: str = "") -> str:
    """Returns the calls in the text of the model's chat template."""
    as_object = format_name == "llama3"
    messages = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": content,
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": name, "arguments": json.loads(a) if as_object else a},
                }
                for name, a in calls
            ],
        },
    ]
    (text,), _ = render_jinja_template(
        [messages], chat_template=template(format_name), bos_token=""
    )
    begin = {
        "deepseek_v3": "<｜Assistant｜>",
        "deepseek_v31": "</think>",
        "llama3": "assistant<|end_header_id|>\n\n",
    }
    end = "<|eot_id|>" if as_object else "<｜end▁of▁sentence｜>"
    return str(text).rpartition(begin[format_name])[2].removesuffix(end)


ONE = ("get_weather", json.dumps(WEATHER, ensure_ascii=False))
TWO = ("add", '{"a": 1,\n "b": -2.5e3}')


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_of_the_template_are_parsed(name: str) -> None:
    parser = TOOL_FORMATS[name].parser(NAMES)
    found = parse(parser, [written(name, ONE)])
    assert found.content == ""
    ((function, arguments),) = found.calls
    assert function == "get_weather"
    assert json.loads(arguments) == WEATHER


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31"])
def test_several_calls_behind_text(name: str) -> None:
    text = written(name, ONE, TWO, ("add", "{}"), content="Let me see.\n")
    found = parse(TOOL_FORMATS[name].parser(NAMES), [text])
    assert found == Found("", "Let me see.\n", [ONE, TWO, ("add", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name":"add","arguments":{}}',
        ' {"type": "function", "name": "add", "parameters": {"a": 1}}\n{"name": "add"}',
        '<|python_tag|>{"parameters": {"a": 1}, "name": "add"};<|python_tag|>{"name": "add"}',
    ],
)
def test_several_llama_calls(text: str) -> None:
    found = parse(TOOL_FORMATS["llama3"].parser(NAMES), [text])
    assert found == Found("", "", [("add", '{"a": 1}'), ("add", "{}")])


B, S = deepseek.CALLS_BEGIN + deepseek.CALL_BEGIN, deepseek.SEPARATOR
NO_CALLS = {
    "deepseek_v3": [
        "",
        " ",
        "just text",
        "<｜tool",
        deepseek.CALLS_BEGIN + "and then nothing",
        deepseek.CALLS_BEGIN + " \n",
        B,
        B + "functional" + S + "add\n```json\n{}\n```" + deepseek.CALL_END,
        B + "function" + S + "add\n```python\n{}\n```" + deepseek.CALL_END,
        B + "function" + S + "add" + " " * 200 + "\n```json\n{}\n```" + deepseek.CALL_END,
        B + "add" + S + "{}" + deepseek.CALL_END,
    ],
    "deepseek_v31": [
        B + "unknown" + S + "{}" + deepseek.CALL_END,
        B + "add\n" + S + "{}" + deepseek.CALL_END,
        B + "add{}" + deepseek.CALL_END + " " * 200,
    ],
    "llama3": [
        "",
        "\n",
        "{",
        "{}",
        '{"answer": 42} and so on',
        '{"name": "unknown", "parameters": {}}',
        '{"name": "add", "parameters": [1]}',
        '{"name": "add", "parameters": "{}"}',
        '{"name": 1, "parameters": {}}',
        '{"name": "add", "parameters": {"a": }}',
        '{"name": "add", "parameters": {"a": 1}',
        "{" * 5000 + "}" * 5000,
        llama3.TAG + "print('{}')",
        "a call is {" + '"name": "add", "parameters": {}}',
    ],
}


def without_markers(name: str, text: str) -> str:
    """Removes the markers one after the other."""
    found = re.split("|".join(map(re.escape, TOOL_FORMATS[name].markers)), text)
    return "".join(found)


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in NO_CALLS.items() for text in texts]
)
def test_other_text_is_content(name: str, text: str) -> None:
    whole = parse(TOOL_FORMATS[name].parser(NAMES), [text])
    assert whole == Found("", without_markers(name, text), [])
    assert parse(TOOL_FORMATS[name].parser(NAMES), text) == whole, "by single characters"


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_calls_before_a_mistake_are_made(name: str) -> None:
    oops = "oops" + " " * 200
    broken = '; {"name": 5}' if name == "llama3" else deepseek.CALL_BEGIN + oops
    text = written(name, ONE).removesuffix(deepseek.CALLS_END) + broken
    found = parse(TOOL_FORMATS[name].parser(NAMES), [text])
    assert [function for function, _ in found.calls] == ["get_weather"]
    assert found.content == without_markers(name, broken)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("deepseek_v3", 'other\n```json\n{"a": 2}\n```'), ("deepseek_v31", 'other{"a": 2}')],
)
def test_a_call_that_was_not_offered_is_text_among_others(name: str, shown: str) -> None:
    text = written(name, ONE, ("other", '{"a": 2}'), TWO)
    whole = parse(TOOL_FORMATS[name].parser(NAMES), [text])
    assert whole == Found("", shown, [ONE, TWO])
    assert parse(TOOL_FORMATS[name].parser(NAMES), text) == whole, "by single characters"


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31"])
def test_an_answer_cut_off_within_arguments(name: str) -> None:
    whole = written(name, TWO)
    at = whole.index("-2.5")
    assert parse(TOOL_FORMATS[name].parser(NAMES), [whole[:at]]).calls == [
        ("add", '{"a": 1,\n "b": ')
    ]


MARKS = [
    *sorted(DEEPSEEK := deepseek.DEEPSEEK_V3.markers),
    *("function", "get_weather", "add", "\n```json\n", "\n```", llama3.TAG),
    *('{"name": "add", "parameters": ', "{}", "}", "; ", '{"a": "}"}', "\n", "<", "｜tool"),
]
assert deepseek.DEEPSEEK_V31.markers == DEEPSEEK
texts = st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=12).map("".join)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@given(text=texts | st.just(""), cuts=st.lists(st.integers(0, 200), max_size=8))
@example(text=written("deepseek_v3", ONE, TWO, content="a"), cuts=[3, 60, 61])
@example(text=written("deepseek_v31", ONE, TWO, content="a"), cuts=[3, 60, 61])
@example(text=written("llama3", ONE) + "; " + written("llama3", TWO), cuts=[3, 60, 61])
def test_how_the_text_was_split_makes_no_difference(name: str, text: str, cuts: list[int]) -> None:
    at = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(at)]
    whole = parse(TOOL_FORMATS[name].parser(NAMES), [text])
    assert parse(TOOL_FORMATS[name].parser(NAMES), pieces) == whole
    assert parse(TOOL_FORMATS[name].parser(NAMES), text) == whole
    if not whole.calls:
        # White space between calls is not content, even between calls of unknown functions.
        lost, kept = without_markers(name, text), whole.content
        if deepseek.CALLS_BEGIN in text:
            lost, kept = "".join(lost.split()), "".join(kept.split())
        assert kept == lost, "nothing is lost"


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("deepseek_v3", "deepseek_r1"), ("deepseek_v31", "deepseek_v3_1"), ("llama3", "llama")],
)
@pytest.mark.parametrize("several", [True, False])
def test_the_grammar_allows_the_same_as_xgrammars_own(
    name: str, theirs: str, several: bool
) -> None:
    functions = {
        key: {"type": "json_schema", "json_schema": SCHEMA} for key in ["get_weather", "add"]
    }
    ours = accepts(
        {"type": "structural_tag", "format": TOOL_FORMATS[name].grammar(functions, several=several)}
    )
    tools = [
        {"type": "function", "function": {"name": function, "parameters": SCHEMA}}
        for function in functions
    ]
    reference = accepts(
        xgrammar.get_model_structural_tag(
            theirs,
            tools=tools,
            tool_choice="required",
            reasoning=False,
            parallel_tool_calls=several,
        )
    )
    calls = [("add", '{"a": 1}'), ("get_weather", '{"a": -5}')]
    one, two = written(name, calls[0]), ""
    if name != "llama3":
        two = written(name, *calls)
        assert reference(two) == ours(two) == several
    assert reference(one)
    assert ours(one)
    for no_call in ("", "text", one[:-1], written(name, ("other", "{}")), one.replace("1", '"x"')):
        assert not ours(no_call)
        assert not reference(no_call)
