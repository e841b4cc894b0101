"""Rewrites a whole schema, part by part, without keywords that xgrammar ignores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

from mla_router.worker.grammar.errors import MAX_DEPTH, GrammarError
from mla_router.worker.grammar.schema import arrays
from mla_router.worker.grammar.schema.merge import merge
from mla_router.worker.grammar.schema.negate import negate
from mla_router.worker.grammar.schema.settle import settle
from mla_router.worker.grammar.schema.values import Inexact, Schema

MAX_ALTERNATIVES = 64
MAX_PARTS = 20_000

# Keywords that do not restrict values.
ANNOTATIONS = frozenset(
    [
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
    ]
)
_COMBINING = frozenset(
    [
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
    ]
)
_CONDITIONS = ("not", "if", "dependentRequired", "dependentSchemas", "dependencies")


class Rewriter:
    """Rewrites a schema for xgrammar. `find` returns the place and the schema to which a `$ref` refers, or raises
    Inexact. `rewrite` raises GrammarError with the place of an unsupported keyword."""

    def __init__(self, find: Callable[[str], tuple[str, Any]]) -> None:
        self._find = find
        self._parts = 0
        self._num_conditions = 0  # conditions so far
        self._numbers: dict[str, int] = {}  # numbers of the referenced places
        self._waiting: list[tuple[str, Any]] = []

    def rewrite(self, schema: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the new schema, and the schemas for `#/$defs/0`, `#/$defs/1`, ... by their places."""
        root, targets = self._part(schema, "", MAX_DEPTH), {}
        while self._waiting:
            place, target = self._waiting.pop()
            targets[place] = self._part(target, place, MAX_DEPTH)
        return root, {place: targets[place] for place in self._numbers}

    def _part(self, schema: Any, where: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        self._count(depth)
        part = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        try:
            match list(part):
                case ["$ref"]:
                    return {"$ref": self._reference(part["$ref"])}
                case ["anyOf"]:
                    return self._any_of(part["anyOf"], f"{where}/anyOf", depth)
                case ["oneOf"]:
                    named = schema.get("discriminator", {}).get("propertyName")
                    apart = self._one_of(part["oneOf"], depth, named, lone=True)
                    return self._any_of(apart, f"{where}/oneOf", depth)
            if not _COMBINING & part.keys():
                parts = arrays.containing(part)
            elif part.keys() == {"unevaluatedProperties"} | (part.keys() - _COMBINING):
                parts = [part]
            else:
                parts = [one for flat in self._flat(part, depth) for one in arrays.containing(flat)]
            if parts == [part]:
                return settle(self._with_inner(part, where, depth))
        except Inexact as error:
            raise GrammarError(f"{where or 'the schema'}: {error}") from None
        return _united([self._part(one, where, depth - 1) for one in parts])

    def _any_of(self, schemas: list[Any], where: str, depth: int) -> Any:
        parts = enumerate(schemas)
        return _united([self._part(one, f"{where}/{index}", depth - 1) for index, one in parts])

    def _reference(self, reference: str) -> str:
        place, target = self._find(reference)
        if place == "":
            return "#"
        if place not in self._numbers:
            self._numbers[place] = len(self._numbers)
            self._waiting.append((place, target))
        return f"#/$defs/{self._numbers[place]}"

    def _with_inner(self, part: Schema, where: str, depth: int) -> Schema:
        """Returns `part` with its inner schemas rewritten."""
        new = dict(part)
        for key in ("properties", "patternProperties"):
            if key in part:
                new[key] = {
                    name: self._part(own, f"{where}/{key}/{name}", depth - 1)
                    for name, own in part[key].items()
                }
        if "prefixItems" in part:
            new["prefixItems"] = [
                self._part(own, f"{where}/prefixItems/{index}", depth - 1)
                for index, own in enumerate(part["prefixItems"])
            ]
        for key in ("items", "additionalProperties", "unevaluatedProperties"):
            if key in part:
                new[key] = self._part(part[key], f"{where}/{key}", depth - 1)
        if "propertyNames" in part:
            names = {"allOf": [{"type": "string"}, part["propertyNames"]]}
            new["propertyNames"] = self._part(names, f"{where}/propertyNames", depth - 1)
        return new

    def _flat(self, schema: Any, depth: int) -> list[Schema]:
        """Returns alternatives without keywords that combine schemas. Together they allow the same values as
        `schema`."""
        if isinstance(schema, bool):
            return [{}] if schema else []
        self._count(depth)
        if "unevaluatedItems" in schema:
            raise Inexact(
                "`unevaluatedItems` is not supported together with keywords that combine schemas"
            )
        keep = schema.keys() - ANNOTATIONS - _COMBINING
        results = [{key: value for key, value in schema.items() if key in keep}]
        num_conditions = self._num_conditions
        for group in self._groups(schema, depth - 1):
            merged = [merge(one, other) for one in results for other in group]
            results = [one for one in merged if one is not None]
            if len(results) > MAX_ALTERNATIVES:
                raise Inexact(f"combines schemas in more than {MAX_ALTERNATIVES} ways")
        if "unevaluatedProperties" in schema:
            if self._num_conditions > num_conditions:
                raise Inexact("`unevaluatedProperties` is not supported together with conditions")
            rest = schema["unevaluatedProperties"]
            results = [{"additionalProperties": rest, **one} for one in results]
        return results

    def _groups(self, schema: Schema, depth: int) -> Iterator[list[Schema]]:
        """Yields lists of alternatives. A value must satisfy one alternative of each list."""
        if "$ref" in schema:
            yield self._flat(self._find(schema["$ref"])[1], depth)
        for part in schema.get("allOf", []):
            yield self._flat(part, depth)
        if "anyOf" in schema:
            yield self._any(schema["anyOf"], depth)
        if "oneOf" in schema:
            yield self._any(self._one_of(schema["oneOf"], depth, lone=False), depth)
        self._num_conditions += any(key in schema for key in _CONDITIONS)
        if "not" in schema:
            yield self._not(schema["not"], depth)
        if "if" in schema and ("then" in schema or "else" in schema):
            holds = self._flat({"allOf": [schema["if"], schema.get("then", True)]}, depth)
            breaks = self._flat({"allOf": [{"not": schema["if"]}, schema.get("else", True)]}, depth)
            yield holds + breaks
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, wanted in schema.get(key, {}).items():
                also = {"required": wanted} if isinstance(wanted, list) else wanted
                without: Schema = {"properties": {name: False}}
                yield self._any([without, {"allOf": [{"required": [name]}, also]}], depth)

    def _any(self, schemas: list[Any], depth: int) -> list[Schema]:
        return [one for part in schemas for one in self._flat(part, depth)]

    def _not(self, schema: Any, depth: int) -> list[Schema]:
        self._count(depth)
        if isinstance(schema, bool):
            return self._flat(not schema, depth)
        schema = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        if "$ref" in schema:
            target = self._find(schema.pop("$ref"))[1]
            schema = {"allOf": [target, schema]}
        if schema.keys() == {"enum"}:
            return [{"not": schema}]
        return [
            one
            for part in negate(schema)
            for one in ([part] if _is_excluding(part) else self._flat(part, depth))
        ]

    def _one_of(
        self, schemas: list[Any], depth: int, named: Any = None, *, lone: bool
    ) -> list[Any]:
        """Returns schemas that exclude each other and together allow the same values as `oneOf`. `named` is the
        property of the schema's discriminator. Raises Inexact."""
        if self._are_apart(schemas, depth, lone):
            return schemas
        if named is not None:
            told = [{"allOf": [one, {"required": [named]}]} for one in schemas]
            if self._are_apart(told, depth, lone):
                return told
        try:
            alone = []
            for index, one in enumerate(schemas):
                others = [{"not": other} for at, other in enumerate(schemas) if at != index]
                alone.append({"allOf": [one, *others]})
            self._any(alone, depth)
        except Inexact as error:
            raise Inexact(
                "`oneOf` is supported only where the type or a required property tells its schemas "
                f"apart: use `anyOf` ({error})"
            ) from None
        return alone

    def _are_apart(self, schemas: list[Any], depth: int, lone: bool) -> bool:
        return all(
            self._excludes(one, other, depth, lone) for one, other in permutations(schemas, 2)
        )

    def _excludes(self, one: Any, other: Any, depth: int, lone: bool) -> bool:
        """Returns whether no value that the grammar of `one` writes satisfies `other`."""
        for first in self._flat(one, depth - 1):
            # The grammar writes only the named properties of an object, unless a keyword allows others.
            closed = {"additionalProperties": False} if lone and "properties" in first else {}
            for second in self._flat(other, depth - 1):
                common = merge({**closed, **first}, second)
                if common is not None and self._part(common, "", depth - 1) is not False:
                    return False
        return True

    def _count(self, depth: int) -> None:
        self._parts += 1
        if depth <= 0:
            raise GrammarError(f"nested deeper than {MAX_DEPTH} levels")
        if self._parts > MAX_PARTS:
            raise GrammarError(f"has more than {MAX_PARTS} parts when its `allOf` are written out")


def _is_excluding(part: Schema) -> bool:
    return (
        part.keys() == {"not"} and isinstance(part["not"], dict) and part["not"].keys() == {"enum"}
    )


def _united(parts: list[Any]) -> Any:
    """Returns a schema that allows any of `parts`; False if none is possible."""
    possible = [part for part in parts if part is not False]
    if any(part is True for part in possible):
        return True
    if len(possible) < 2:
        return possible[0] if possible else False
    return {"anyOf": possible}
