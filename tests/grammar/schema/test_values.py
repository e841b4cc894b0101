"""Values that a schema lists, compared with the jsonschema library."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest

from mla_router.worker.grammar.schema.values import (
    MAX_INTEGERS,
    Inexact,
    canonical,
    finite,
    holds,
    integer_range,
    listed,
)

VALUES: list[Any] = [
    *(-2, -1, 0, 1, 2, 3, 2.0, 2.5),
    *("", "a", "ab", "abc", True, False, None, [], [1], {}, {"a": 1}),
]
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def valid(value: Any, schema: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize(
    "schema",
    [
        *({key: limit} for key in BOUNDS for limit in (1, 2.5)),
        *({"multipleOf": step} for step in (1, 2, 3)),
        *({key: 2} for key in ("minLength", "maxLength")),
        *({"type": name} for name in ("integer", "number", "string", "boolean", "null", "array")),
        {"type": ["object", "number"], "maximum": 2},
        {"not": {"enum": [2, "a", None]}},
        {"not": {"enum": [True, [1]]}, "minLength": 1},
    ],
    ids=json.dumps,
)
def test_a_value_holds_if_it_is_valid(schema: dict[str, Any]) -> None:
    found = {canonical(value): holds(value, schema) for value in VALUES}
    assert found == {canonical(value): valid(value, schema) for value in VALUES}


def test_keywords_of_other_types_do_not_matter() -> None:
    assert holds("a", {"minItems": 3})
    with pytest.raises(Inexact, match="`minItems` is not supported together with `enum`"):
        holds([], {"minItems": 3})


@pytest.mark.parametrize("low", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("high", ["maximum", "exclusiveMaximum"])
@pytest.mark.parametrize(("least", "most"), [(-2, 3), (-1.5, 2.5), (0.5, 2), (2, 2), (3, 1)])
def test_integers_between_bounds(low: str, high: str, least: float, most: float) -> None:
    schema = {"type": "integer", low: least, high: most}
    expected = [number for number in range(-5, 6) if valid(number, schema)]
    assert finite(schema) == expected
    if expected:
        assert integer_range(schema) == (expected[0], expected[-1])


def test_the_tighter_of_two_bounds_counts() -> None:
    tight = {"minimum": 1, "exclusiveMinimum": 3, "maximum": 9, "exclusiveMaximum": 8}
    assert integer_range(tight) == (4, 7)
    assert integer_range({"maximum": 4.5}) == (None, 4)
    assert integer_range({"maximum": -1.5}) == (None, -2)


def test_a_long_range_is_no_list() -> None:
    schema = {"type": "integer", "minimum": 1}
    assert finite(schema) is None
    numbers = finite({**schema, "maximum": MAX_INTEGERS})
    assert numbers == [*range(1, MAX_INTEGERS + 1)]
    assert finite({**schema, "maximum": MAX_INTEGERS + 1}) is None


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["null", "boolean"]},
        {"enum": [1, 1.0, "a", True]},
        {"enum": [1, "a"], "const": "a"},
        {"enum": [1, "a"], "const": 2},
        {"const": [1]},
        {"anyOf": [{"type": "boolean"}, {"enum": [1, True]}, False]},
        {"type": "integer", "minimum": 0, "maximum": 6, "multipleOf": 3},
    ],
    ids=json.dumps,
)
def test_all_values_of_a_schema(schema: Any) -> None:
    found = finite(schema)
    assert found is not None
    texts = [canonical(value) for value in found]
    assert len(set(texts)) == len(texts)
    candidates = [*VALUES, *range(4, 12)]
    assert set(texts) == {canonical(value) for value in candidates if valid(value, schema)}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "string"},
        {"type": ["boolean", "string"]},
        {"type": "integer", "minimum": 0},
        {"type": "integer", "maximum": 0},
        {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
    ],
    ids=json.dumps,
)
def test_many_values_are_not_listed(schema: Any) -> None:
    assert finite(schema) is None
    assert schema is True or listed(schema) is None


def test_equal_values_have_equal_texts() -> None:
    """By JSON Schema 1 equals 1.0, at any depth, and not true."""
    ones: list[Any] = [1, 1.0, True, "1", [1], [1.0], [True], {"a": 1, "b": 2}, {"b": 2.0, "a": 1}]
    for first, second in itertools.product(ones, ones):
        assert (canonical(first) == canonical(second)) == valid(first, {"const": second})
