"""Reasoning is split from the answer, with any boundaries of the pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.server.text.answer import AnswerFormat, AnswerParser
from mla_router.worker.server.text.reasoning import ReasoningSplitter, begins_inside
from mla_router.worker.server.text.tool_calls.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from mla_router.worker.server.text.tool_calls.llama3 import LLAMA3
from support.answers import Found, parse, template


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm.\n\n2 < 3\n</think>\n\nThree.\n", "Hm.\n\n2 < 3", "Three.\n"),
        (True, "Hm.\n</think>Three.", "Hm.", "Three."),
        (True, "\n<think>Hm.</think>Three.", "Hm.", "Three."),
        (True, "</think>Three.", "", "Three."),
        (False, "<think></think> Three.", "", "Three."),
        (False, "  Three. <think>no</think>", "", "  Three. <think>no</think>"),
        (False, "Three.</think>", "", "Three.</think>"),
        (True, "cut off <", "cut off <", ""),
        (True, "cut off </thin", "cut off </thin", ""),
        (True, "Hm.</think>\n", "Hm.", ""),
        (False, "<thin", "", "<thin"),
        (False, " <think> ", "", ""),
        (False, "", "", ""),
        (True, "a</think>b</think>c", "a", "b</think>c"),
    ],
)
def test_examples(inside: bool, text: str, reasoning: str, content: str) -> None:
    expected = Found(reasoning, content)
    assert parse(ReasoningSplitter(inside=inside), [text]) == expected
    assert parse(ReasoningSplitter(inside=inside), text) == expected, "by single characters"


MARKS = ["<think>", "</think>", "<", "think>", " ", "\n", "a", "</"]
texts = st.lists(st.sampled_from(MARKS), max_size=12).map("".join)


@given(text=texts, inside=st.booleans(), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_how_the_text_was_split_makes_no_difference(
    text: str, inside: bool, cuts: list[int]
) -> None:
    at = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(at)]
    whole = parse(ReasoningSplitter(inside=inside), [text])
    assert parse(ReasoningSplitter(inside=inside), pieces) == whole
    assert parse(ReasoningSplitter(inside=inside), text) == whole


def test_where_an_answer_begins() -> None:
    assert begins_inside("<｜User｜>Hi<｜Assistant｜><think>\n")
    assert begins_inside("<｜Assistant｜><think>")
    assert not begins_inside("<｜Assistant｜></think>")
    assert not begins_inside("<think> is a tag<｜Assistant｜>")


CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"


def parser(*, several: bool = True) -> AnswerParser:
    return AnswerFormat(DEEPSEEK_V31, reasons=True).parser(
        ["add"], reasoning=True, inside=True, several=several
    )


def test_calls_are_looked_for_in_the_answer_alone() -> None:
    text = f"I could {CALL}</think>\n\nI will. {CALL}"
    found = parse(parser(), text)
    assert found == Found(f"I could {CALL}", "I will. ", [("add", "{}")])


def test_only_one_call_without_parallel_calls() -> None:
    several = CALL + CALL.removeprefix("<｜tool▁calls▁begin｜>") + "<｜tool▁calls▁end｜>!"
    assert parse(parser(), f"</think>{several}") == Found("", "!", [("add", "{}")] * 2)
    assert parse(parser(several=False), f"</think>{several}") == Found("", "!", [("add", "{}")])


@pytest.mark.parametrize(
    ("name", "tools", "reasons"),
    [
        ("deepseek_v3", DEEPSEEK_V3, True),
        ("deepseek_v31", DEEPSEEK_V31, True),
        ("llama3", LLAMA3, False),
    ],
)
def test_the_format_is_that_of_the_template(name: str, tools: object, reasons: bool) -> None:
    assert AnswerFormat.of("auto", "auto", template(name)) == AnswerFormat(tools, reasons)  # type: ignore[arg-type]


def test_the_format_is_that_of_the_flags() -> None:
    assert AnswerFormat.of("none", "none", template("deepseek_v3")) == AnswerFormat(None, False)
    assert AnswerFormat.of("llama3", "deepseek_r1", "") == AnswerFormat(LLAMA3, True)
