"""Schemas that no value satisfies, and their simplification, compared with the jsonschema library."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest

from mla_router.worker.grammar.schema.settle import MAX_MULTIPLES, settle
from mla_router.worker.grammar.schema.values import Inexact

QUARTERS = [number / 4 for number in range(-16, 17)]
ENDS = [(1, 2), (2, 2), (2, 1), (2.5, 2.5), (1.25, 1.75), (-1.5, -1), (3, -3)]
NAMES = ("a", "b", "c")


def valid(value: Any, schema: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize("low", [("minimum",), ("exclusiveMinimum",), ()])
@pytest.mark.parametrize("high", [("maximum",), ("exclusiveMaximum",), ()])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_numbers_without_a_value(low: tuple[str, ...], high: tuple[str, ...], kind: str) -> None:
    for least, most in ENDS:
        schema = {"type": kind} | dict.fromkeys(low, least) | dict.fromkeys(high, most)
        is_possible = any(valid(number, schema) for number in QUARTERS)
        assert (settle(schema) is not False) == is_possible, schema


@pytest.mark.parametrize("kind", ["integer", "number", ["integer"]])
def test_the_tighter_bounds_count(kind: str | list[str]) -> None:
    for limits in itertools.product((1, 2), repeat=4):
        keys = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        schema = {"type": kind, **dict(zip(keys, limits, strict=True))}
        is_possible = any(valid(number, schema) for number in QUARTERS)
        assert (settle(schema) is not False) == is_possible, schema


def test_multiples_between_bounds_are_listed() -> None:
    for step, least, most in itertools.product((1, 3, 4), (-7, -3, 0, 1), (-4, 0, 5.5, 8)):
        schema = {"type": "integer", "multipleOf": step, "minimum": least, "maximum": most}
        numbers = [number for number in range(-9, 10) if valid(number, schema)]
        assert settle(schema) == ({"enum": numbers} if numbers else False), schema


def test_so_many_multiples_and_no_more() -> None:
    schema = {"type": "integer", "multipleOf": 2, "minimum": 1, "maximum": 2 * MAX_MULTIPLES}
    assert len(settle(schema)["enum"]) == MAX_MULTIPLES
    with pytest.raises(Inexact, match=f"at most {MAX_MULTIPLES} of them"):
        settle(schema | {"minimum": 0})


def test_lengths_without_a_string() -> None:
    for least, most in itertools.product(range(3), repeat=2):
        lengths = {"minLength": least, "maxLength": most}
        assert (settle({"type": "string"} | lengths) is False) == (least > most)
        # Another type is left
        assert settle({"type": ["string", "null"]} | lengths) is not False
    for lengths in ({"minLength": 1}, {"maxLength": 0}):
        assert settle({"type": "string"} | lengths) == {"type": "string"} | lengths


def test_excluded_values_of_other_types_are_left_out() -> None:
    assert settle({"type": "string", "not": {"enum": [1, None]}}) == {"type": "string"}
    assert settle({"type": "boolean", "not": {"enum": [True]}}) == {"enum": [False]}
    for schema in ({"type": "string"}, {}):
        with pytest.raises(Inexact, match="few values are left"):
            settle(schema | {"not": {"enum": ["a"]}})


def objects() -> list[dict[str, int]]:
    """Returns all objects with the properties of NAMES."""
    return [dict.fromkeys(names, 1) for n in range(4) for names in itertools.combinations(NAMES, n)]


@pytest.mark.parametrize("forbidden", ["", "a", "ab"])
@pytest.mark.parametrize("required", ["", "a", "bc"])
def test_objects_of_named_properties(forbidden: str, required: str) -> None:
    properties = {name: name not in forbidden for name in NAMES}
    named = {"type": "object", "properties": properties, "required": list(required)}
    for least, most in itertools.product(range(5), repeat=2):
        schema = {**named, "minProperties": least, "maxProperties": most}
        expected = [one for one in objects() if valid(one, schema)]
        found = settle({**schema, "additionalProperties": False})
        assert (found is not False) == bool(expected), schema
        if found is not False:
            assert [one for one in objects() if valid(one, found)] == expected, schema
            assert False not in found["properties"].values()


@pytest.mark.parametrize(
    "names",
    [{"enum": ["a", "c"]}, {"const": "b"}, {"maxLength": 0}, {"minLength": 1}, {"type": "string"}],
    ids=json.dumps,
)
def test_names_of_named_properties(names: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": dict.fromkeys(NAMES, True), "propertyNames": names}
    found = settle(schema)
    assert "propertyNames" not in found
    assert set(found["properties"]) == {name for name in NAMES if valid({name: 1}, schema)}


def test_no_names_are_no_properties() -> None:
    found = settle({"type": "object", "propertyNames": False, "patternProperties": {"a": True}})
    assert found == {"type": "object", "properties": {}, "additionalProperties": False}


CLOSED = {"type": "object", "properties": {"a": True, "b": True}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "minProperties": 2}, "`minProperties` is supported only of"),
        (CLOSED | {"minProperties": 2, "additionalProperties": {}}, "`minProperties` is"),
        (CLOSED | {"minProperties": 2, "patternProperties": {"^c": {}}}, "`minProperties` is"),
        (
            CLOSED | {"properties": {"a": False}, "additionalProperties": True},
            "cannot forbid `a` together with",
        ),
        (
            CLOSED | {"properties": {"a": False}, "patternProperties": {"^c": {}}},
            "cannot forbid `a` together with",
        ),
        (
            CLOSED | {"propertyNames": {"maxLength": 1}, "additionalProperties": True},
            "together with",
        ),
        (
            CLOSED | {"propertyNames": {"maxLength": 1}, "patternProperties": {"c": {}}},
            "together with",
        ),
        (CLOSED | {"propertyNames": {"pattern": "a"}}, "with a pattern is not supported"),
        (CLOSED | {"patternProperties": {"^b$": {}}}, "must not match `b`"),
        ({"uniqueItems": True}, "only together with `type`: array"),
    ],
)
def test_refusals_give_the_reason(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(Inexact, match=reason):
        settle(schema)


def test_one_unnamed_property_more_than_the_required_ones_may_be_counted() -> None:
    schema = {"type": "object", "minProperties": 2, "required": ["a"], "properties": {"a": True}}
    assert settle({**schema, "additionalProperties": True}) is not False
