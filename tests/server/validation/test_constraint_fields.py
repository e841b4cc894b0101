"""Fields that ask for a grammar: which one reaches the scheduler, and what is refused under which
name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.schema.fields import OpenAIFields
from mla_router.worker.server.schema.parse import parse
from mla_router.worker.server.validation.constraint import MAX_SOURCE, Constraint
from mla_router.worker.server.validation.constraint_fields import read_constraint

DECODER = msgspec.json.Decoder(OpenAIFields)
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {}}, "required": ["z"]}
TAG = {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}
FORMAT = {"type": "tag", "begin": "<f>", "content": {"type": "any_text"}, "end": "</f>"}


def read(body: dict[str, Any]) -> Constraint | None:
    fields, _ = parse(json.dumps(body).encode(), DECODER)
    return read_constraint(fields, fields.response_format)


@pytest.mark.parametrize("body", [{}, {"response_format": {"type": "text"}}, {"regex": None}])
def test_nothing_is_asked_for(body: dict[str, Any]) -> None:
    assert read(body) is None


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    """It is the order in which they are written."""
    wanted = {"name": "n", "schema": SCHEMA, "strict": False, "description": "d"}
    constraint = read({"response_format": {"type": "json_schema", "json_schema": wanted}})
    assert constraint is not None
    assert constraint.field == "response_format.json_schema.schema"
    assert constraint.grammar.kind == "json_schema"
    assert list(json.loads(constraint.grammar.source)["properties"]) == ["z", "a"]


@pytest.mark.parametrize(
    ("body", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "json_schema",
            {},
        ),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"json_schema": True}, "json_schema", True),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        (
            {"structural_tag": json.dumps({"type": "structural_tag", "format": FORMAT})},
            "structural_tag",
            {"type": "structural_tag", "format": FORMAT},
        ),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": [TAG],
                    "triggers": ["<f"],
                }
            },
            "structural_tag",
            {
                "type": "structural_tag",
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<f"],
                    "tags": [
                        {
                            "begin": "<f>",
                            "content": {"type": "json_schema", "json_schema": TAG["schema"]},
                            "end": "</f>",
                        }
                    ],
                },
            },
        ),
    ],
)
def test_each_spelling_becomes_a_grammar(body: dict[str, Any], kind: str, source: Any) -> None:
    constraint = read(body)
    assert constraint is not None
    grammar = constraint.grammar
    assert grammar.kind == kind
    assert (grammar.source if isinstance(source, str) else json.loads(grammar.source)) == source


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"structural_tag": "{"}, "structural_tag"),
        ({"structural_tag": {"type": "structural_tag", "triggers": ["a"]}}, "structural_tag"),
        ({"regex": 5}, "regex"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"regex": "a" * (MAX_SOURCE + 1)}, "regex"),
        ({"json_schema": {"enum": ["é" * MAX_SOURCE]}}, "json_schema"),
    ],
)
def test_invalid_values_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    assert caught.value.body.error.param == param
    assert caught.value.body.error.message.startswith(param)
