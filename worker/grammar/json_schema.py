"""Prepares JSON schemas for xgrammar, which ignores some keywords.

An answer that breaks its schema is worse than a refusal. So keywords that xgrammar ignores are rewritten into others
(`schema/`), or the schema is refused, with the place of the keyword. The list of keywords that xgrammar 0.2.8 ignores
comes from a test of each keyword of the 2020-12 drafts with a value that the keyword forbids.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from mla_router.worker.grammar import json_pattern
from mla_router.worker.grammar.errors import MAX_DEPTH, GrammarError
from mla_router.worker.grammar.schema.formats import PATTERNS
from mla_router.worker.grammar.schema.rewrite import Rewriter
from mla_router.worker.grammar.schema.values import Inexact

# Keywords that xgrammar ignores.
_NOT_ENFORCED = ("$dynamicRef", "$recursiveRef")
# Keywords that xgrammar enforces only beside these types.
_NEEDS_TYPE = {
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "exclusiveMaximum": ("integer", "number"),
    "multipleOf": ("integer",),
    "minLength": ("string",),
    "maxLength": ("string",),
    "pattern": ("string",),
    "format": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "minProperties": ("object",),
    "maxProperties": ("object",),
    "patternProperties": ("object",),
    "propertyNames": ("object",),
}
_MAX_STEP = 1024  # largest `multipleOf` that xgrammar enforces
# xgrammar enforces only one of these groups.
_LENGTHS = ("minLength", "maxLength")
_OF_STRINGS = (("format",), ("pattern",), _LENGTHS)
# The types of the keywords that this package reads.
_SHAPES: dict[str, tuple[type, str]] = {
    "required": (list, "a list of names"),
    **dict.fromkeys(("enum", "anyOf", "oneOf", "allOf", "prefixItems"), (list, "a list")),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), (dict, "an object")),
    **dict.fromkeys(("dependentRequired", "dependencies", "discriminator"), (dict, "an object")),
    **dict.fromkeys(("$ref", "$anchor"), (str, "a string")),
    "pattern": (str, "a regular expression"),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), (int, "a whole number")),
    **dict.fromkeys(("minProperties", "maxProperties"), (int, "a whole number")),
    **dict.fromkeys(("minContains", "maxContains", "multipleOf"), (int, "a whole number")),
}
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

_IN_DICT = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_IN_PLACE = (
    *("items", "additionalProperties", "unevaluatedProperties", "propertyNames", "contains"),
    *("not", "if", "then", "else"),
)


def prepare(source: str) -> str:
    """Returns the schema for xgrammar's strict mode, in which objects have only named properties; an object without
    named properties may have any. Raises GrammarError."""
    try:
        schema = json.loads(source)
    except RecursionError:
        raise GrammarError(f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise GrammarError(f"not valid JSON ({error})") from None
    given = dict(_parts(schema, "", MAX_DEPTH))
    for where, part in given.items():
        if problem := _misshapen(part):
            raise _error(where, problem)
    root, targets = Rewriter(_Places(given).find).rewrite(schema)
    if root is False:
        raise GrammarError("the schema: no value satisfies it")
    for first, inner in [("", root), *targets.items()]:
        for where, part in _parts(inner, first, sys.maxsize):
            if problem := _problem(part):
                raise _error(where, problem)
            try:
                _finish(part)
            except ValueError as error:
                raise _error(where, str(error)) from None
    if targets:
        numbered = {str(number): target for number, target in enumerate(targets.values())}
        root = {**root, "$defs": numbered}
    return json.dumps(root)


def _error(where: str, problem: str) -> GrammarError:
    return GrammarError(f"{where or 'the schema'}: {problem}")


class _Places:
    """The schemas to which `$ref` may refer."""

    def __init__(self, parts: dict[str, dict[str, Any]]) -> None:
        self._parts = parts
        self._anchors = {
            part["$anchor"]: where for where, part in parts.items() if "$anchor" in part
        }

    def find(self, reference: str) -> tuple[str, dict[str, Any]]:
        """Returns the place to which `reference` refers, and the schema there. Raises Inexact."""
        name = unquote(reference.removeprefix("#"))
        place = self._anchors.get(name, name.replace("~1", "/").replace("~0", "~"))
        if not reference.startswith("#"):
            raise Inexact(
                f"`$ref` is `{reference}`, but must be a place in this schema: `#`, `#/...` or `#ANCHOR`"
            )
        if place not in self._parts:
            raise Inexact(f"`$ref` names `{reference}`, where there is no schema")
        return place, self._parts[place]


def _finish(part: dict[str, Any]) -> None:
    """Adds the keywords that xgrammar's strict mode needs. Raises ValueError for an unsupported pattern."""
    is_object, is_array = part.get("type") == "object", part.get("type") == "array"
    if is_object and not {"properties", "patternProperties", "propertyNames"} & part.keys():
        part.setdefault("additionalProperties", True)
    if is_array and not {"items", "prefixItems", "unevaluatedItems"} & part.keys():
        part["items"] = True
    if "prefixItems" in part:  # xgrammar refuses `true` there
        part["prefixItems"] = [{} if item is True else item for item in part["prefixItems"]]
    if isinstance(named := part.get("format"), str) and named in PATTERNS:
        part["pattern"] = PATTERNS[part.pop("format")]
    if "pattern" in part:
        part["pattern"] = json_pattern.of_text(part["pattern"])
    if "patternProperties" in part:
        named = part["patternProperties"]
        part["patternProperties"] = {json_pattern.of_text(name): own for name, own in named.items()}
    _bound_length(part)


def _misshapen(part: dict[str, Any]) -> str:
    for key, (wanted, name) in _SHAPES.items():
        value = part.get(key, wanted())
        if not isinstance(value, wanted) or isinstance(value, bool):
            return f"`{key}` must be {name}"
    if not all(isinstance(name, str) for name in part.get("required", [])):
        return "`required` must be a list of names"
    types = part.get("type", [])
    if not isinstance(types, str | list) or not all(isinstance(name, str) for name in types):
        return "`type` must be a name or a list of names"
    if part.get("multipleOf", 1) <= 0:
        return "`multipleOf` must be greater than 0"
    for key in _LIMITS:
        limit = part.get(key, 0)
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            return f"`{key}` must be a number"
        if isinstance(limit, float) and not math.isfinite(limit):  # as 1e999 is read
            return f"`{key}` is out of range"
    for key in ("dependentRequired", "dependencies"):
        for names in part.get(key, {}).values():
            is_schema = key == "dependencies" and isinstance(names, dict | bool)
            is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
            if not is_schema and not is_list:
                return f"`{key}` must have lists of names"
    return ""


def _bound_length(part: dict[str, Any]) -> None:
    """Replaces the length of a string by a pattern: xgrammar's own count allows control characters, which JSON
    forbids."""
    if {"minLength", "maxLength"} & part.keys():
        least, most = part.pop("minLength", 0), part.pop("maxLength", "")
        part["pattern"] = rf"^[\s\S]{{{least},{most}}}$"


def _parts(schema: Any, where: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields all schemas in `schema` with their places, itself first. Raises GrammarError."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise GrammarError(f"{where or 'the schema'}: must be an object")
    if depth == 0:
        raise GrammarError(f"nested deeper than {MAX_DEPTH} levels")
    yield where, schema
    for key in _IN_DICT:
        inner = schema.get(key)
        if isinstance(inner, dict):
            for name, part in inner.items():
                yield from _parts(part, f"{where}/{key}/{name}", depth - 1)
    for key in _IN_LIST:
        inner = schema.get(key)
        if isinstance(inner, list):
            for index, part in enumerate(inner):
                yield from _parts(part, f"{where}/{key}/{index}", depth - 1)
    for key in _IN_PLACE:
        if key in schema:
            yield from _parts(schema[key], f"{where}/{key}", depth - 1)
    dependencies = schema.get("dependencies")
    if isinstance(dependencies, dict):
        for name, part in dependencies.items():
            if not isinstance(part, list):
                yield from _parts(part, f"{where}/dependencies/{name}", depth - 1)


def _problem(part: dict[str, Any]) -> str:
    """Returns the reason why xgrammar would not enforce this part; empty if it does. xgrammar itself reports invalid
    schemas."""
    for key in _NOT_ENFORCED:
        if key in part:
            return f"`{key}` is not supported"
    types = part.get("type")
    types = types if isinstance(types, list) else [types]
    for key, wanted in _NEEDS_TYPE.items():
        if key in part and not set(wanted) & set(map(str, types)):
            return f"`{key}` is supported only together with `type`: {' or '.join(wanted)}"
    given = [[key for key in keys if key in part] for keys in _OF_STRINGS]
    if len(several := [keys[0] for keys in given if keys]) > 1:
        return f"`{several[0]}` is not supported together with `{several[1]}`"
    if "multipleOf" in part and "number" in types:
        return "`multipleOf` is supported only of an integer"
    if part.get("multipleOf", 1) > _MAX_STEP:
        return f"`multipleOf` above {_MAX_STEP} is supported only between `minimum` and `maximum`"
    named = part.get("properties", {})
    missing = [name for name in part.get("required", ()) if name not in named]
    if missing:
        return f"`required` names `{missing[0]}`, which is none of `properties`"
    return ""
