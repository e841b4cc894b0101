"""JSON schemas: what of them xgrammar honours, and what it would silently leave out.

An answer that breaks its schema is worse than a refusal, so a schema that says more than can be
enforced is refused, with the place. What xgrammar 0.2.8 leaves out was found by asking it for each
keyword of the 2020-12 drafts whether it accepts what the keyword forbids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from mla_router.worker.grammar.errors import GrammarError

MAX_DEPTH = 64

# Keywords that would be ignored.
_NOT_ENFORCED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "$dynamicRef",
        "$recursiveRef",
    }
)
# Keywords that say nothing about a value.
_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
        "$anchor",
        "$defs",
        "definitions",
        "nullable",
        "discriminator",
    }
)
# Keywords that are enforced only beside the type that they are about.
_NEEDS_TYPE = {
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "exclusiveMaximum": ("integer", "number"),
    "multipleOf": ("integer", "number"),
    "minLength": ("string",),
    "maxLength": ("string",),
    "pattern": ("string",),
    "format": ("string",),
}
# Keywords beside which all others are ignored.
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")

_IN_DICT = ("properties", "patternProperties", "$defs", "definitions")
_IN_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_IN_PLACE = ("items", "additionalProperties", "unevaluatedProperties", "propertyNames")

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def prepare(source: str) -> str:
    """The schema for xgrammar's strict mode, in which objects have only the properties that they
    name; one that names none may have any. Raises GrammarError."""
    try:
        schema = json.loads(source)
    except RecursionError:
        raise GrammarError(f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise GrammarError(f"not valid JSON ({error})") from None
    for where, part in _parts(schema, "", MAX_DEPTH):
        problem = _problem(part)
        if problem:
            raise GrammarError(f"{where or 'the schema'}: {problem}")
        is_object = part.get("type") == "object"
        if is_object and not {"properties", "patternProperties", "propertyNames"} & part.keys():
            part.setdefault("additionalProperties", True)
        _bound_length(part)
        if isinstance(part.get("pattern"), str):
            part["pattern"] = _spell_options(part["pattern"])
    return json.dumps(schema)


def _bound_length(part: dict[str, Any]) -> None:
    """Say the length of a string by a pattern: where xgrammar counts characters itself, it lets
    control characters through, which JSON does not allow."""
    if {"minLength", "maxLength"} & part.keys():
        least, most = part.pop("minLength", 0), part.pop("maxLength", "")
        part["pattern"] = rf"^[\s\S]{{{least},{most}}}$"


# A character class, an escape, a quantifier with what may follow it, or what opens a group.
_REGEX_TOKEN = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]|\\.|\(\?|[*+?}]\??|.", re.DOTALL)


def _spell_options(pattern: str) -> str:
    """Write `x?` as `x{0,1}`: in a schema, xgrammar reads `(ab+)?` as `(a?b+)?`."""
    tokens = _REGEX_TOKEN.findall(pattern)
    return "".join("{0,1}" if token in ("?", "??") else token for token in tokens)


def _parts(schema: Any, where: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in `schema`, itself first, with its place."""
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


def _problem(part: dict[str, Any]) -> str:
    """Why this part cannot be enforced; empty if it can. What is wrong in itself, xgrammar says."""
    for key in sorted(_NOT_ENFORCED & part.keys()):
        if part[key] is not False:
            return f"`{key}` is not supported"
    types = part.get("type")
    types = types if isinstance(types, list) else [types]
    for key, wanted in _NEEDS_TYPE.items():
        if key in part and not set(wanted) & set(map(str, types)) and not _has_alone(part):
            return f"`{key}` is supported only beside `type`: {' or '.join(wanted)}"
    if "pattern" in part and {"minLength", "maxLength"} & part.keys():
        return "`pattern` is not supported beside `minLength` or `maxLength`"
    reference = part.get("$ref")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        return "`$ref` must be a place in this schema: `#` or `#/...`"
    if isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1:
        return "`allOf` of more than one schema is not supported"
    alone = next((key for key in _ALONE if key in part), None)
    if alone is not None:
        beside = part.keys() - _ANNOTATIONS - {alone}
        if alone in ("const", "enum"):
            beside -= {"type"}
            values = part["enum"] if alone == "enum" else [part["const"]]
            if "type" in part and not all(_is_of(value, types) for value in values):
                return f"`{alone}` has a value that is not of `type`"
        if alone in ("anyOf", "oneOf", "$ref") and set(map(str, types)) == {"object"}:
            beside -= {"type"}
        if beside:
            return f"`{min(beside)}` is not supported beside `{alone}`"
    named = part.get("properties", {})
    missing = [name for name in part.get("required", []) if name not in named]
    if missing:
        return f"`required` names `{missing[0]}`, which is none of `properties`"
    return ""


def _has_alone(part: dict[str, Any]) -> bool:
    return any(key in part for key in _ALONE)


def _is_of(value: Any, types: list[Any]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, _TYPES.get(str(name), ())) for name in types)
