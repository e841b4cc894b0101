"""Negates schemas: the result has no `not`, except `{"not": {"enum": [...]}}`, which `settle.py` resolves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mla_router.worker.grammar.schema.values import ALL_TYPES, Inexact, Schema

_BEYOND = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_FEWER = {
    "minLength": ("string", "maxLength"),
    "minItems": ("array", "maxItems"),
    "minProperties": ("object", "maxProperties"),
}
_MORE = {
    "maxLength": ("string", "minLength"),
    "maxItems": ("array", "minItems"),
    "maxProperties": ("object", "minProperties"),
}


def negate(schema: Schema | bool) -> list[Schema]:
    """Returns schemas. A value breaks `schema` if and only if it satisfies at least one of them. `schema` has no
    `$ref` at its top. Raises Inexact."""
    if isinstance(schema, bool):
        return [] if schema else [{}]
    return [part for key, value in schema.items() for part in _broken(key, value)]


def _broken(key: str, value: Any) -> Iterator[Schema]:
    """Yields the schemas of values that break one keyword."""
    match key:
        case "type":
            types = [value] if isinstance(value, str) else value
            if "integer" in types and "number" not in types:
                raise Inexact("`not` of the type `integer` is not supported: use other types")
            if others := [name for name in ALL_TYPES if name not in types]:
                yield {"type": others}
        case "const":
            yield {"not": {"enum": [value]}}
        case "enum":
            yield {"not": {"enum": value}}
        case "not":
            if value is not False:
                yield {} if value is True else value
        case "allOf":
            yield from ({"not": part} for part in value)
        case "anyOf":
            yield {"allOf": [{"not": part} for part in value]}
        case "required":
            yield from ({"type": "object", "properties": {name: False}} for name in value)
        case "properties":
            for name, own in value.items():
                inner = {"properties": {name: {"not": own}}}
                yield {"type": "object", "required": [name], **inner}
        case _ if key in _BEYOND:
            yield {"type": "number", _BEYOND[key]: value}
        case _ if key in _FEWER:
            kind, opposite = _FEWER[key]
            if value > 0:
                yield {"type": kind, opposite: value - 1}
        case _ if key in _MORE:
            kind, opposite = _MORE[key]
            yield {"type": kind, opposite: value + 1}
        case _:
            raise Inexact(f"`{key}` is not supported within `not` or `if`")
