"""JSON schemas: what of them xgrammar honours, and what it would silently leave out.

An answer that breaks its schema is worse than a refusal, so a schema that says more than can be
enforced is refused, with the place. What xgrammar 0.2.8 leaves out was found by asking it for each
keyword of the 2020-12 drafts whether it accepts what the keyword forbids.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from typing import Any
from urllib.parse import unquote

from mla_router.worker.grammar import json_pattern
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
# Of which only one is enforced; lengths go together.
_LENGTHS = ("minLength", "maxLength")
_OF_STRINGS = (("format",), ("pattern",), _LENGTHS)
# What values of keywords must be that are looked at here.
_SHAPES: dict[str, tuple[type, str]] = {
    "required": (list, "a list of names"),
    "enum": (list, "a list"),
    "properties": (dict, "an object"),
    "patternProperties": (dict, "an object"),
    "pattern": (str, "a regular expression"),
    "minLength": (int, "a whole number"),
    "maxLength": (int, "a whole number"),
    "multipleOf": (int, "a whole number"),
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
    parts = dict(_parts(schema, "", MAX_DEPTH))
    for where, part in parts.items():
        problem = _misshapen(part) or _problem(part) or _leads_nowhere(part, parts)
        if problem:
            raise GrammarError(f"{where or 'the schema'}: {problem}")
    for where, part in parts.items():
        is_object, is_array = part.get("type") == "object", part.get("type") == "array"
        if is_object and not {"properties", "patternProperties", "propertyNames"} & part.keys():
            part.setdefault("additionalProperties", True)
        if is_array and not {"items", "prefixItems", "unevaluatedItems"} & part.keys():
            part["items"] = True
        try:
            if "pattern" in part:
                part["pattern"] = json_pattern.of_text(part["pattern"])
            if "patternProperties" in part:
                named = part["patternProperties"]
                part["patternProperties"] = {
                    json_pattern.of_text(name): own for name, own in named.items()
                }
        except ValueError as error:
            raise GrammarError(f"{where or 'the schema'}: {error}") from None
        _bound_length(part)
    return json.dumps(schema)


def _misshapen(part: dict[str, Any]) -> str:
    for key, (wanted, name) in _SHAPES.items():
        value = part.get(key, wanted())
        if not isinstance(value, wanted) or isinstance(value, bool):
            return f"`{key}` must be {name}"
    if not all(isinstance(name, str) for name in part.get("required", [])):
        return "`required` must be a list of names"
    return ""


def _leads_nowhere(part: dict[str, Any], places: Container[str]) -> str:
    """A reference to what is no schema's place: nobody has looked at what it says."""
    reference = part.get("$ref")
    if not isinstance(reference, str):
        return ""
    place = unquote(reference.removeprefix("#")).replace("~1", "/").replace("~0", "~")
    return "" if place in places else f"`$ref` names `{reference}`, where there is no schema"


def _bound_length(part: dict[str, Any]) -> None:
    """Say the length of a string by a pattern: where xgrammar counts characters itself, it lets
    control characters through, which JSON does not allow."""
    if {"minLength", "maxLength"} & part.keys():
        least, most = part.pop("minLength", 0), part.pop("maxLength", "")
        part["pattern"] = rf"^[\s\S]{{{least},{most}}}$"


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
    given = [[key for key in keys if key in part] for keys in _OF_STRINGS]
    if len(several := [keys[0] for keys in given if keys]) > 1:
        return f"`{several[0]}` is not supported beside `{several[1]}`"
    if "multipleOf" in part and "number" in types:
        return "`multipleOf` is supported only of an integer"
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
    missing = [name for name in part.get("required", ()) if name not in named]
    if missing:
        return f"`required` names `{missing[0]}`, which is none of `properties`"
    return ""


def _has_alone(part: dict[str, Any]) -> bool:
    return any(key in part for key in _ALONE)


def _is_of(value: Any, types: list[Any]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, _TYPES.get(str(name), ())) for name in types)
