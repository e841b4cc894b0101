"""Simplifies one part of a schema into xgrammar's keywords. Its inner parts are rewritten already."""

from __future__ import annotations

import re
from typing import Any

from mla_router.worker.grammar.schema import arrays, pattern_length
from mla_router.worker.grammar.schema.values import (
    APPLIES_TO,
    Inexact,
    Schema,
    excluded,
    finite,
    has_type,
    holds,
    integer_range,
    listed,
    types_of,
)

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

MAX_MULTIPLES = 1000


def settle(part: Schema) -> Any:
    """Returns the simplified part; False if no value is possible. Raises Inexact."""
    values = listed(part)
    if values is not None:
        possible = [value for value in values if holds(value, part)]
        return {"enum": possible} if possible else False
    types = types_of(part)
    if types is not None:
        part = {
            key: value
            for key, value in part.items()
            if key not in APPLIES_TO or set(types) & set(APPLIES_TO[key])
        }
    if "not" in part:
        return _excluding(part)
    if types == ["integer"]:
        part = _integer(part)
    if part and types in (["integer"], ["number"]) and _is_empty(part):
        return False
    if "multipleOf" in part and part.keys() & set(_BOUNDS):
        return _multiples(part)
    if "string" in (types or ()) and "pattern" in part and {"minLength", "maxLength"} & part.keys():
        least, most = part.get("minLength", 0), part.get("maxLength")
        part = {key: value for key, value in part.items() if key not in ("minLength", "maxLength")}
        part["pattern"] = pattern_length.bounded(part["pattern"], least, most)
    if part.get("minLength", 0) > part.get("maxLength", part.get("minLength", 0)):
        return False if types == ["string"] else part
    _check_count(part)
    if types == ["object"]:
        return _object(part)
    return arrays.settled(part) if types == ["array"] else _without_false(part)


def _excluding(part: Schema) -> Any:
    types, rest = types_of(part), {key: value for key, value in part.items() if key != "not"}
    if types is not None and not any(has_type(value, types) for value in excluded(part)):
        return settle(rest)
    values = finite(rest)
    if values is None:
        raise Inexact(
            "`not` of values is supported only where few values are left: with `enum`, or an integer "
            "with `minimum` and `maximum`"
        )
    return settle({"enum": values, "not": part["not"]})


def _integer(part: Schema) -> Schema:
    """Rounds the bounds of an integer to whole numbers."""
    if not any(isinstance(part.get(key), float) for key in _BOUNDS):
        return part
    low, high = integer_range(part)
    ends = {"minimum": low, "maximum": high}
    rest = {key: value for key, value in part.items() if key not in _BOUNDS}
    return rest | {key: value for key, value in ends.items() if value is not None}


def _multiples(part: Schema) -> Any:
    """Returns the list of multiples, because xgrammar ignores `multipleOf` beside a bound. Raises Inexact."""
    low, high = integer_range(part)
    step = part["multipleOf"]
    if types_of(part) == ["integer"] and low is not None and high is not None:
        first, last = -(-low // step), high // step
        if last - first < MAX_MULTIPLES:
            values = [number * step for number in range(first, last + 1)]
            return {"enum": values} if values else False
    raise Inexact(
        f"`multipleOf` with a bound is supported only for integers, at most {MAX_MULTIPLES} of them, "
        "between `minimum` and `maximum`"
    )


def _is_empty(part: Schema) -> bool:
    if types_of(part) == ["integer"]:
        low, high = integer_range(part)
        return low is not None and high is not None and low > high
    lows = [part[key] for key in ("minimum", "exclusiveMinimum") if key in part]
    highs = [part[key] for key in ("maximum", "exclusiveMaximum") if key in part]
    if not lows or not highs or max(lows) < min(highs):
        return False
    is_open = part.get("exclusiveMinimum") == max(lows) or part.get("exclusiveMaximum") == min(
        highs
    )
    return bool(max(lows) > min(highs)) or is_open


def _without_false(part: Schema) -> Any:
    """Simplifies a part of several types or without a type. The later check of keywords refuses impossible values."""
    if part.get("uniqueItems"):
        raise Inexact("`uniqueItems` is supported only together with `type`: array")
    if any(own is False for own in part.get("properties", {}).values()):
        return _object(part)
    return part


def _object(part: Schema) -> Any:
    names = part.get("propertyNames", True)
    if names is False:
        names, part = True, {**part, "properties": {}, "additionalProperties": False}
        part.pop("patternProperties", None)
    if names is True:
        part = {key: value for key, value in part.items() if key != "propertyNames"}
    elif "properties" in part:
        part = _named(part, names)
    if part.get("patternProperties") is not None:
        _check_patterns(part)
    given: dict[str, Any] = part.get("properties", {})
    impossible = [name for name, own in given.items() if own is False]
    if impossible:
        if part.get("additionalProperties", False) is not False or "patternProperties" in part:
            raise Inexact(
                f"`properties` cannot forbid `{impossible[0]}` together with `additionalProperties`: leave it out"
            )
        part = {
            **part,
            "properties": {name: own for name, own in given.items() if own is not False},
        }
    required = part.get("required", [])
    most = part.get("maxProperties", len(required))
    if set(required) & set(impossible) or len(set(required)) > most:
        return False
    is_closed = part.get("additionalProperties", False) is False and "patternProperties" not in part
    if is_closed and "properties" in part and "propertyNames" not in part:
        most = min(part.get("maxProperties", len(part["properties"])), len(part["properties"]))
    else:
        most = part.get("maxProperties", part.get("minProperties", 0))
    return False if part.get("minProperties", 0) > most else part


def _check_count(part: Schema) -> None:
    """Raises Inexact for a count of unnamed properties: the grammar may write the same name twice."""
    least = part.get("minProperties", 0)
    is_closed = part.get("additionalProperties", False) is False and "properties" in part
    is_closed = is_closed and "patternProperties" not in part
    if least > len(set(part.get("required", []))) + 1 and not is_closed:
        raise Inexact(
            "`minProperties` is supported only of `properties`, without others: list the names, or require 1"
        )


def _named(part: Schema, names: Any) -> Schema:
    """Applies `propertyNames` to the named properties. Raises Inexact."""
    if part.get("additionalProperties", False) is not False or "patternProperties" in part:
        raise Inexact(
            "`propertyNames` is not supported together with `properties` and other properties"
        )
    if not names.keys() <= {"type", "enum", "const", "minLength", "maxLength"}:
        raise Inexact(
            "`propertyNames` with a pattern is not supported together with `properties`: leave it out"
        )
    allowed = listed(names)
    own = {
        name: inner if holds(name, names) and (allowed is None or name in allowed) else False
        for name, inner in part["properties"].items()
    }
    return {
        **{key: value for key, value in part.items() if key != "propertyNames"},
        "properties": own,
    }


def _check_patterns(part: Schema) -> None:
    """Raises Inexact if a named property matches a pattern: it would have to satisfy both schemas."""
    for pattern in part["patternProperties"]:
        for name in part.get("properties", {}):
            try:
                matches = re.search(pattern, name) or re.search(pattern, name, re.ASCII)
            except re.error as error:
                raise Inexact(
                    f"`patternProperties` is not supported with `{pattern}` together with `properties` ({error})"
                ) from None
            if matches:
                raise Inexact(f"`patternProperties` must not match `{name}`, one of `properties`")
