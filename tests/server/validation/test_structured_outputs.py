"""vLLM's fields for grammars: which grammar they become, and errors that name them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.grammar.vocabulary import read_vocabulary
from mla_router.worker.grammar.xgrammar_backend import Compiler, Matcher
from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.schema.fields import SamplingFields
from mla_router.worker.server.schema.parse import parse
from mla_router.worker.server.validation.constraint import Constraint
from mla_router.worker.server.validation.constraint_fields import read_constraint

DECODER = msgspec.json.Decoder(SamplingFields)
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {}}}
FORMAT = {"type": "tag", "begin": "<f>", "content": {"type": "any_text"}, "end": "</f>"}
TAG = {"type": "structural_tag", "format": FORMAT}


def read(body: dict[str, Any]) -> Constraint | None:
    fields, _ = parse(json.dumps(body).encode(), DECODER)
    return read_constraint(fields, None)


@pytest.mark.parametrize(
    ("name", "value", "kind", "source"),
    [
        ("json", SCHEMA, "json_schema", SCHEMA),
        ("json", json.dumps(SCHEMA), "json_schema", SCHEMA),
        ("json", True, "json_schema", True),
        ("regex", "a+", "regex", "a+"),
        ("grammar", 'root ::= "a"', "ebnf", 'root ::= "a"'),
        ("json_object", True, "json_schema", {"type": "object"}),
        ("structural_tag", TAG, "structural_tag", TAG),
        ("structural_tag", json.dumps(TAG), "structural_tag", TAG),
    ],
)
def test_each_kind_becomes_a_grammar(name: str, value: Any, kind: str, source: Any) -> None:
    bodies: dict[str, Any] = {f"structured_outputs.{name}": {"structured_outputs": {name: value}}}
    if name in ("json", "regex", "grammar"):
        bodies[f"guided_{name}"] = {f"guided_{name}": value}
    for field, body in bodies.items():
        constraint = read(body)
        assert constraint is not None
        assert constraint.field == field
        grammar = constraint.grammar
        assert grammar.kind == kind
        assert (grammar.source if isinstance(source, str) else json.loads(grammar.source)) == source


@pytest.mark.parametrize("spelling", ["structured_outputs", "guided_choice"])
def test_a_choice_is_one_of_the_texts_and_nothing_else(spelling: str) -> None:
    texts = ["Java", "JavaScript", 'C"\\\n', "a|b", "日本 😀", ""]
    asked = {"choice": texts} if spelling == "structured_outputs" else texts
    constraint = read({spelling: asked})
    assert constraint is not None
    vocabulary = read_vocabulary(SMALL_MODEL, 1024)
    compiler = Compiler(vocabulary)
    compiled = compiler.compile(constraint.grammar)

    def is_sentence(text: str) -> bool:
        matcher = Matcher(compiled)
        return all(map(matcher.accept, [*vocabulary.encode(text), min(vocabulary.eos_ids)]))

    assert all(map(is_sentence, texts))
    for other in ("Jav", "JavaScripts", "C", "a", "b", "Java JavaScript"):
        assert not is_sentence(other), other


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"regex": {"1": "a"}}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {}}, "guided_regex": "a"}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {}}, "ebnf": "a"}, "structured_outputs.json"),
        ({"guided_choice": []}, "guided_choice"),
    ],
)
def test_wrong_values_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    assert caught.value.body.error.param == param


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("whitespace_pattern", "[ ]?"),
        ("disable_any_whitespace", True),
        ("disable_additional_properties", True),
    ],
)
def test_options_that_are_missing_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read({"structured_outputs": {"json": {}, option: value}})
    assert caught.value.body.error.param == f"structured_outputs.{option}"
    assert caught.value.body.error.code == "unsupported_parameter"


def test_options_that_are_off_are_accepted() -> None:
    off = {"disable_any_whitespace": False, "disable_additional_properties": False}
    assert read({"structured_outputs": {"json": {}, "whitespace_pattern": None} | off}) is not None
