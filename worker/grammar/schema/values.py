"""Values that a schema lists: their equality by JSON Schema, and the check of other keywords."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

Schema = dict[str, Any]

MAX_INTEGERS = 256  # size of a range that becomes a list

ALL_TYPES = ("array", "boolean", "null", "number", "object", "string")

_NUMBERS = ("integer", "number")
# The types that a keyword restricts. It allows all values of other types.
APPLIES_TO: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBERS),
    "multipleOf": _NUMBERS,
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), ("string",)),
    **dict.fromkeys(("minItems", "maxItems", "items", "prefixItems"), ("array",)),
    **dict.fromkeys(("uniqueItems", "contains", "minContains", "maxContains"), ("array",)),
    **dict.fromkeys(("minProperties", "maxProperties", "properties", "required"), ("object",)),
    **dict.fromkeys(("patternProperties", "additionalProperties", "propertyNames"), ("object",)),
}
_CHECKS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, limit: bool(value >= limit),
    "maximum": lambda value, limit: bool(value <= limit),
    "exclusiveMinimum": lambda value, limit: bool(value > limit),
    "exclusiveMaximum": lambda value, limit: bool(value < limit),
    "multipleOf": lambda value, limit: value % limit == 0,
    "minLength": lambda value, limit: len(value) >= limit,
    "maxLength": lambda value, limit: len(value) <= limit,
}


class Inexact(ValueError):
    """No grammar of xgrammar allows exactly the values of the schema. The message names the keyword."""


def types_of(schema: Schema) -> list[str] | None:
    """Returns the types; None without `type`."""
    named = schema.get("type")
    return [named] if isinstance(named, str) else named


def type_of(value: Any) -> str:
    """Returns the most specific type of a value; 1.0 is an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def has_type(value: Any, types: Iterable[str]) -> bool:
    own = type_of(value)
    return own in types or (own == "integer" and "number" in types)


def canonical(value: Any) -> str:
    """Returns the same text for equal values. 1 and 1.0 are equal, 1 and true are not."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def listed(schema: Schema) -> list[Any] | None:
    """Returns the distinct values of `enum` and `const`; None without both."""
    if "enum" not in schema and "const" not in schema:
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    unique = {canonical(value): value for value in reversed(values)}
    if "enum" in schema and "const" in schema:
        unique = {key: value for key, value in unique.items() if key == canonical(schema["const"])}
    return list(reversed(unique.values()))


def holds(value: Any, schema: Schema) -> bool:
    """Returns whether a listed value satisfies the keywords beside the list. Raises Inexact."""
    types = types_of(schema)
    if types is not None and not has_type(value, types):
        return False
    if canonical(value) in map(canonical, excluded(schema)):
        return False
    own = type_of(value)
    for key, limit in schema.items():
        if own not in APPLIES_TO.get(key, ()):
            continue
        if key not in _CHECKS:
            raise Inexact(f"`{key}` is not supported together with `enum` or `const`")
        if not _CHECKS[key](value, limit):
            return False
    return True


def excluded(schema: Schema) -> list[Any]:
    """Returns the values that `not` lists."""
    values: list[Any] = schema.get("not", {"enum": []})["enum"]
    return values


def finite(schema: Schema | bool) -> list[Any] | None:
    """Returns all values of a schema without `not`; None if they are many."""
    if isinstance(schema, bool):
        return None if schema else []
    if (values := listed(schema)) is not None:
        return values
    if isinstance(schema.get("anyOf"), list):
        parts = [finite(part) for part in schema["anyOf"]]
        found = [value for part in parts if part is not None for value in part]
        return None if None in parts else listed({"enum": found})
    match types_of(schema):
        case list() as types if set(types) <= {"boolean", "null"}:
            return [True, False] * ("boolean" in types) + [None] * ("null" in types)
        case ["integer"]:
            low, high = integer_range(schema)
            if low is not None and high is not None and high - low < MAX_INTEGERS:
                return [value for value in range(low, high + 1) if holds(value, schema)]
    return None


def integer_range(schema: Schema) -> tuple[int | None, int | None]:
    """Returns the least and the greatest integer within the bounds; None without a bound."""
    lows = [-(-limit // 1) for limit in [schema["minimum"]]] if "minimum" in schema else []
    highs = [schema["maximum"] // 1] if "maximum" in schema else []
    if "exclusiveMinimum" in schema:
        lows.append(schema["exclusiveMinimum"] // 1 + 1)
    if "exclusiveMaximum" in schema:
        highs.append(-(-schema["exclusiveMaximum"] // 1) - 1)
    return (int(max(lows)) if lows else None, int(min(highs)) if highs else None)
