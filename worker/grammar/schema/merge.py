"""Merges two schemas into the schema of the values that both allow.

Both have no keywords that combine schemas. For an inner part that both restrict, the merged schema has
`{"allOf": [first, second]}`, so that references are followed only as far as needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from mla_router.worker.grammar.schema.values import Inexact, Schema, canonical, listed, types_of

_LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_OF_NAMES = ("properties", "patternProperties", "additionalProperties")
_COMBINED = ("properties", "additionalProperties", "items", "prefixItems", "type", "enum", "const")
# These are merged only if both are equal.
_EQUAL = ("pattern", "format", "patternProperties", "contains", "minContains", "maxContains")

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(_LARGER, max),
    **dict.fromkeys(_SMALLER, min),
    "multipleOf": lambda first, second: math.lcm(first, second),
    "required": lambda first, second: list(dict.fromkeys([*first, *second])),
    "uniqueItems": lambda first, second: first or second,
    "not": lambda first, second: {"enum": [*first["enum"], *second["enum"]]},
    "propertyNames": lambda first, second: both(first, second),
}


def both(first: Any, second: Any) -> Any:
    """Returns the schema of the values that both schemas allow."""
    if first is False or second is False:
        return False
    if first is True or canonical(first) == canonical(second):
        return second
    return first if second is True else {"allOf": [first, second]}


def merge(first: Schema, second: Schema) -> Schema | None:
    """Returns the merged schema; None if no value satisfies both. Raises Inexact."""
    merged: Schema = {}
    for key in (*first, *(key for key in second if key not in first)):
        if key in _COMBINED:
            continue
        if key not in first or key not in second:
            merged[key] = first[key] if key in first else second[key]
        elif canonical(first[key]) == canonical(second[key]):
            merged[key] = first[key]
        elif key in _COMBINE:
            merged[key] = _COMBINE[key](first[key], second[key])
        elif key in _EQUAL:
            raise Inexact(f"two different `{key}` for one value are not supported: write one")
    types = _common_types(types_of(first), types_of(second))
    if types is not None:
        if not types:
            return None
        merged["type"] = types[0] if len(types) == 1 else types
    values = _common_values(listed(first), listed(second))
    if values is not None:
        if not values:
            return None
        merged["enum"] = values
    _merge_properties(first, second, merged)
    _merge_items(first, second, merged)
    return merged


def _common_types(first: list[str] | None, second: list[str] | None) -> list[str] | None:
    if first is None or second is None:
        return second if first is None else first
    common = [
        name for name in first if name in second or (name == "integer" and "number" in second)
    ]
    if "integer" in second and "number" in first and "integer" not in common:
        common.append("integer")
    return common


def _common_values(first: list[Any] | None, second: list[Any] | None) -> list[Any] | None:
    if first is None or second is None:
        return second if first is None else first
    others = set(map(canonical, second))
    return [value for value in first if canonical(value) in others]


def _merge_properties(first: Schema, second: Schema, merged: Schema) -> None:
    for one, other in ((first, second), (second, first)):
        if "patternProperties" in one and any(key in other for key in _OF_NAMES) and one != other:
            raise Inexact("`patternProperties` cannot be merged with another schema's properties")
    if "properties" in first or "properties" in second:
        ours, theirs = first.get("properties", {}), second.get("properties", {})
        merged["properties"] = {
            name: both(
                ours.get(name, first.get("additionalProperties", True)),
                theirs.get(name, second.get("additionalProperties", True)),
            )
            for name in [*ours, *(name for name in theirs if name not in ours)]
        }
    extra = [
        one["additionalProperties"] for one in (first, second) if "additionalProperties" in one
    ]
    if extra:
        merged["additionalProperties"] = both(extra[0], extra[-1])


def _merge_items(first: Schema, second: Schema, merged: Schema) -> None:
    ours, theirs = first.get("items", True), second.get("items", True)
    if "prefixItems" in first or "prefixItems" in second:
        missing = object()
        pairs = zip_longest(
            first.get("prefixItems", []), second.get("prefixItems", []), fillvalue=missing
        )
        merged["prefixItems"] = [
            both(ours if one is missing else one, theirs if other is missing else other)
            for one, other in pairs
        ]
    if "items" in first or "items" in second:
        merged["items"] = both(ours, theirs)
