"""Grammars as parts of others, and how large they may be."""

from __future__ import annotations

import json

import pytest

from mla_router.worker.messages import Grammar
from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.validation.constraint import MAX_SOURCE, Constraint, structural_tag

FORMAT = {"type": "tag", "begin": "<f>", "content": {"type": "any_text"}, "end": "</f>"}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "a+"),
        Grammar("ebnf", 'root ::= "a"+'),
        Grammar("json_schema", '{"const":"a"}'),
        Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": FORMAT})),
    ],
)
def test_thoughts_may_come_before_any_of_them(grammar: Grammar) -> None:
    """test_reasoning in tests/grammar has what such a grammar allows."""
    after = Constraint(grammar, "field").after("</think>")
    assert after.field == "field"
    thoughts, _, inner = json.loads(after.grammar.source)["format"]["elements"]
    assert thoughts["end"] == "</think>"
    assert inner["type"] in ("regex", "grammar", "json_schema", "tag")


def test_grammars_of_tools_are_limited_too() -> None:
    with pytest.raises(InvalidRequest, match=r"tools: has \d+ bytes, more than") as refused:
        structural_tag({"type": "regex", "pattern": "a" * MAX_SOURCE}, "tools")
    assert refused.value.body.error.param == "tools"
