"""Keywords that combine schemas: the texts of a grammar are checked with the jsonschema library."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar

from mla_router.worker.grammar.errors import GrammarError
from mla_router.worker.grammar.json_schema import prepare

# A token for each byte; 0 ends the text.
BYTES = xgrammar.TokenizerInfo([bytes([octet]) for octet in range(256)], stop_token_ids=[0])
NUM_RANDOM = 1000
COMPILER = xgrammar.GrammarCompiler(BYTES, max_threads=1)

INTEGER, STRING, BOOLEAN = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
DIGITS = {"type": "array", "items": DIGIT}


def obj(properties: dict[str, Any], required: str = "", **more: Any) -> Any:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def compiled(schema: Any) -> xgrammar.CompiledGrammar:
    grammar = xgrammar.Grammar.from_json_schema(prepare(json.dumps(schema)), any_whitespace=False)
    return COMPILER.compile_grammar(grammar)


def allows(grammar: xgrammar.CompiledGrammar, value: Any) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    # Listed arrays are written without blanks, others with them.
    texts = [json.dumps(value), json.dumps(value, separators=(",", ":"))]
    for text in texts:
        matcher.reset()
        if matcher.accept_string(text) and matcher.is_terminated():
            return True
    return False


def write(grammar: xgrammar.CompiledGrammar, seed: int) -> str | None:
    """Draws a random text of the grammar; None if it gets long."""
    matcher, choose = xgrammar.GrammarMatcher(grammar), random.Random(seed)
    masks, text = np.zeros((1, 8), dtype=np.int32), bytearray()
    while len(text) < 400:
        matcher.fill_next_token_bitmask(masks, 0)
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
        choices = [int(octet) for octet in np.flatnonzero(bits[:128])]  # ASCII: each is a character
        assert choices, f"nothing may follow {bytes(text)!r}"
        if 0 in choices:
            return text.decode()
        ends = [octet for octet in b'"]}' if octet in choices]
        octet = ends[0] if ends and choose.random() < 0.4 else choose.choice(choices)
        assert matcher.accept_token(octet)
        text.append(octet)
    return None


KIND = {"properties": {"kind": {"const": "a"}}, "required": ["kind"]}
EXACT: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "allOf": (
        {"allOf": [obj({"a": INTEGER}, "a"), obj({"b": STRING, "a": {"minimum": 3}}, "b")]},
        [{"a": 3, "b": "x"}],
        [{"a": 2, "b": "x"}, {"a": 3}, {"b": "x"}],
    ),
    "allOf of a reference": (
        {
            "$defs": {"base": obj({"id": INTEGER, "next": {"$ref": "#"}}) | {"required": ["id"]}},
            "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"id": {"enum": [1, 2]}}}],
        },
        [{"id": 1}, {"id": 1, "next": {"id": 2}}],
        [{"id": 3}, {"id": 1, "next": {"id": 3}}],
    ),
    "allOf of lists of values": (
        {"allOf": [{"enum": [1, True, "a", None]}, {"enum": [True, "a", 2]}, {"type": "boolean"}]},
        [True],
        [1, "a", None],
    ),
    "allOf of bounds": ({"allOf": [INTEGER, {"minimum": 1.5}, {"maximum": 4}]}, [2, 4], [1, 5]),
    "allOf of closed objects": (
        {"allOf": [obj({"a": INTEGER}, additionalProperties=False), obj({"a": {}, "b": {}})]},
        [{"a": 1}, {}],
        [{"b": 1}],
    ),
    "anyOf beside properties": (
        obj({"a": INTEGER, "b": INTEGER}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{}],
    ),
    "oneOf beside properties": (
        obj({"a": INTEGER, "b": INTEGER}, oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "oneOf that overlaps": (
        {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]},
        [1, 3],
        [2],
    ),
    "not of values": ({"enum": ["a", "b", 1], "not": {"const": "a"}}, ["b", 1], ["a"]),
    "not of an integer": ({**DIGIT, "not": {"enum": [3, 4]}}, [2, 5], [3, 4, 10]),
    "not of a type": ({"not": {"type": ["object", "array", "string"]}}, [1, None, True], ["a", {}]),
    "not of a length": ({**STRING, "not": {"minLength": 3}}, ["", "ab"], ["abc"]),
    "not of a longest length": ({**STRING, "not": {"maxLength": 1}}, ["ab"], ["", "a"]),
    "not of any length": (
        {"anyOf": [{**STRING, "not": {"minLength": 0}}, INTEGER]},
        [1],
        ["", "a"],
    ),
    "not of a count": ({**DIGITS, "not": {"minItems": 2}}, [[], [1]], [[1, 2]]),
    "not of a largest count": ({**DIGITS, "not": {"maxItems": 1}}, [[1, 2]], [[], [1]]),
    "not of an open bound": ({**DIGIT, "not": {"exclusiveMaximum": 3}}, [3], [2]),
    "not of either bound": ({**DIGIT, "not": {"minimum": 3, "maximum": 6}}, [2, 7], [3, 6]),
    "not of not": ({"not": {"not": {"enum": [1, "a"]}}}, [1, "a"], [2]),
    "not of all numbers": (
        {"type": ["integer", "string"], "not": {"type": ["integer", "number"]}},
        ["a"],
        [1],
    ),
    "contains behind a prefix": (
        {**DIGITS, "prefixItems": [STRING], "contains": {"const": 5}, "maxItems": 3},
        [["a", 5], ["a", 1, 5]],
        [["a"], ["a", 1], [5], ["a", 1, 2, 5]],
    ),
    "contains within a prefix": (
        {
            **DIGITS,
            "prefixItems": [DIGIT, DIGIT],
            "items": False,
            "contains": {"const": 5},
            "minItems": 2,
            "maxItems": 2,
        },
        [[5, 1], [1, 5]],
        [[1, 2], [5]],
    ),
    "contains in the longest array": (
        {**DIGITS, "contains": {"const": 5}, "maxItems": 16},
        [[1] * 15 + [5]],
        [[1] * 16, [1] * 16 + [5]],
    ),
    "uniqueItems of one": (
        {"type": "array", "items": STRING, "uniqueItems": True, "maxItems": 1},
        [[], ["a"]],
        [["a", "b"]],
    ),
    "uniqueItems between counts": (
        {**DIGITS, "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 1, "maxItems": 2},
        [[1], [1, 2], [3, 1]],
        [[], [1, 1], [1, 2, 3]],
    ),
    "not of a property": (
        obj({"a": INTEGER, "b": INTEGER}, **{"not": {"required": ["a", "b"]}}),
        [{"a": 1}, {"b": 1}, {}],
        [{"a": 1, "b": 1}],
    ),
    "if": (
        obj(
            {"kind": {"enum": ["a", "b"]}, "x": INTEGER},
            **{"if": KIND, "then": {"required": ["x"]}, "else": {"properties": {"x": False}}},
        ),
        [{"kind": "a", "x": 1}, {"kind": "b"}, {}],
        [{"kind": "a"}, {"kind": "b", "x": 1}],
    ),
    "if of a bound": (
        {**DIGIT, "if": {"minimum": 5}, "then": {"multipleOf": 2}},
        [3, 6, 8],
        [7],
    ),
    "dependentRequired": (
        obj({"a": INTEGER, "b": INTEGER}, dependentRequired={"a": ["b"]}),
        [{"a": 1, "b": 1}, {"b": 1}, {}],
        [{"a": 1}],
    ),
    "dependentSchemas": (
        obj(
            {"a": INTEGER, "b": INTEGER},
            dependentSchemas={"a": {"properties": {"b": {"minimum": 5}}}},
        ),
        [{"b": 1}, {"a": 1, "b": 5}],
        [{"a": 1, "b": 4}],
    ),
    "dependencies": (
        obj({"a": INTEGER, "b": INTEGER}, dependencies={"a": ["b"]}),
        [{"b": 1}],
        [{"a": 1}],
    ),
    "uniqueItems": (
        {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True, "minItems": 1},
        [["b"], ["b", "a"], [1, "a", "b"]],
        [[], ["a", "a"]],
    ),
    "contains": (
        {"type": "array", "items": DIGIT, "contains": {"const": 7}, "maxItems": 3},
        [[7], [1, 7], [1, 2, 7], [7, 7, 7]],
        [[], [1], [1, 2, 3], [7, 1, 2, 3]],
    ),
    "contains beside items of any kind": (
        {"type": "array", "contains": {"const": 7}, "maxItems": 2},
        [[7], ["a", 7], [None, 7], [7, {"b": []}]],
        [[], ["a"], [1, 2], [7, 1, 2]],
    ),
    "prefixItems of any kind": (
        {"type": "array", "prefixItems": [True, INTEGER], "items": False, "minItems": 2},
        [[1, 2], ["a", 7], [{"b": [None]}, 3]],
        [[7], [1, "a"], [1, 2, 3]],
    ),
    "$anchor": (
        {"$defs": {"p": {"$anchor": "point", **obj({"x": INTEGER}, "x")}}, "$ref": "#point"},
        [{"x": 1}],
        [{}],
    ),
    "beside $ref": ({"$defs": {"n": INTEGER}, "$ref": "#/$defs/n", "minimum": 5}, [5], [4, "a"]),
    "pattern of a length": (
        {"type": "string", "pattern": "^[a-z][a-z0-9-]*$", "minLength": 2, "maxLength": 4},
        ["ab", "a-b1"],
        ["a", "abcde", "1a"],
    ),
    "pattern within a length": (
        {"type": "string", "pattern": "^(ab|c{2,3}d?)$", "maxLength": 4},
        ["ab", "cccd"],
        ["cd"],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^[a-c]$"}, "maxProperties": 2},
        [{"a": 1}, {}],
        [{"d": 1}],
    ),
    "propertyNames beside properties": (
        obj({"a": INTEGER, "bb": INTEGER}, propertyNames={"maxLength": 1}),
        [{"a": 1}, {}],
        [{"bb": 1}],
    ),
    "unevaluatedProperties": (
        {"allOf": [obj({"a": INTEGER}, "a")], "unevaluatedProperties": False},
        [{"a": 1}],
        [{"a": 1, "b": 2}],
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_grammar_allows_exactly_the_schema(name: str) -> None:
    schema, valid, invalid = EXACT[name]
    validator, grammar = jsonschema.Draft202012Validator(schema), compiled(schema)
    if name == "dependencies":
        validator = jsonschema.Draft7Validator(schema)
    assert [value for value in valid if not validator.is_valid(value)] == []
    assert [value for value in invalid if validator.is_valid(value)] == []
    assert [value for value in valid if not allows(grammar, value)] == []
    assert [value for value in invalid if allows(grammar, value)] == []


def leaf(choose: random.Random) -> Any:
    bounds = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
    limits = {key: choose.randint(0, 3) for key in choose.sample(bounds, choose.randint(0, 2))}
    sizes = ["minLength", "maxLength"]
    lengths = {key: choose.randint(0, 3) for key in choose.sample(sizes, choose.randint(0, 2))}
    pattern = choose.choice(["^a*$", "^[ab]{1,2}c?$", "^(a|bb)$", "^a+b{2}$"])
    values = choose.sample([0, 1, 2, True, False, None, "a", "bb"], choose.randint(1, 4))
    return choose.choice(
        [
            {**INTEGER, **limits},
            {**STRING, **lengths},
            {**STRING, "pattern": pattern, **lengths},
            {"enum": values},
            {"const": values[0]},
            {"type": choose.choice(["boolean", "null", ["integer", "null"], "object"])},
            {"required": choose.sample("abc", choose.randint(0, 2))},
            limits,
        ]
    )


def random_schema(choose: random.Random, depth: int) -> Any:
    def some(chance: float) -> bool:
        return choose.random() < chance

    def inner() -> Any:
        return random_schema(choose, depth - 1) if some(0.95) else some(0.5)

    schema = leaf(choose)
    if depth == 0 or some(0.2):
        return schema
    number = choose.randint(0, 3)
    names = choose.sample("abc", 2)
    if some(0.6):
        schema = obj({name: inner() for name in names}, "".join(names[: choose.randint(0, 2)]))
        more = {
            "additionalProperties": some(0.5) and inner(),
            "unevaluatedProperties": False,
            "dependentRequired": {names[0]: [names[1]]},
            "dependentSchemas": {names[1]: inner()},
            "propertyNames": choose.choice([{"enum": ["a", "b"]}, {"maxLength": 0}]),
            "maxProperties": number,
            "minProperties": number,
        }
        schema |= {key: more[key] for key in more if some(0.15)}
    elif some(0.5):
        more = {
            "items": inner(),
            "prefixItems": [inner()],
            "maxItems": number,
            "minItems": choose.randint(0, 2),
            "uniqueItems": True,
            "contains": inner(),
        }
        schema = {"type": "array", **{key: more[key] for key in more if some(0.4)}}
    for key in ("allOf", "anyOf", "oneOf"):
        if some(0.15):
            schema[key] = [inner() for _ in range(choose.randint(1, 3))]
    for key in ("not", "if", "then", "else"):
        if some(0.15):
            schema[key] = inner()
    return schema


def test_texts_of_random_schemas_are_valid() -> None:
    num_written = 0
    for seed in range(NUM_RANDOM):
        schema = random_schema(random.Random(seed), 3)
        try:
            grammar = compiled(schema)
        except (GrammarError, RuntimeError):  # refused, by us or by xgrammar
            continue
        text = write(grammar, seed)
        if text is not None:
            num_written += 1
            error = next(
                jsonschema.Draft202012Validator(schema).iter_errors(json.loads(text)), None
            )
            assert error is None, f"{seed}: {json.dumps(schema)} has {text}: {error}"
    assert num_written > NUM_RANDOM // 4


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({**STRING, "pattern": "^a*b*$", "maxLength": 3}, "say the length in the pattern"),
        ({**STRING, "not": {"const": "a"}}, "`not` of values .* with `enum`"),
        ({**STRING, "not": {"pattern": "a"}}, "`pattern` is not supported within `not`"),
        ({"type": "array", "items": STRING, "uniqueItems": True}, "`items` of few values"),
        (
            {"type": "array", "items": {"enum": list(range(9))}, "uniqueItems": True},
            "list fewer values, or set a lower `maxItems`",
        ),
        (
            {**DIGITS, "items": {"enum": list(range(11))}, "uniqueItems": True, "maxItems": 3},
            "1000",
        ),
        ({"type": "array", "contains": INTEGER}, "`maxItems` of at most"),
        ({**DIGITS, "contains": INTEGER, "maxItems": 17}, "`maxItems` of at most 16"),
        ({**DIGITS, "contains": INTEGER, "minContains": 2, "maxItems": 3}, "`minContains` and"),
        ({**DIGITS, "contains": INTEGER, "maxContains": 1, "maxItems": 3}, "`minContains` and"),
        ({"not": INTEGER}, "use other types"),
        ({"allOf": [{**STRING, "pattern": "a"}, {"pattern": "b"}]}, "two different `pattern`"),
        ({**INTEGER, "multipleOf": 2, "minimum": 0}, "between `minimum` and `maximum`"),
        ({**INTEGER, "multipleOf": 2, "minimum": 1e300, "maximum": 1e301}, "at most 1000"),
        ({"oneOf": [{**STRING, "pattern": "a"}, STRING]}, "use `anyOf`"),
        ({"allOf": [INTEGER, STRING]}, "no value satisfies it"),
        (obj({"a": {"allOf": [INTEGER, STRING]}}, "a"), "no value satisfies it"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {}]}}}, "deeper"),
        (obj({"a": {"not": {**STRING, "format": "date"}}}), "^/properties/a: `format`"),
        (obj({"ab": {}}, patternProperties={"^a": INTEGER}), "must not match `ab`"),
        (obj({"a": {"$ref": "#nowhere"}}), "^/properties/a: `\\$ref` names `#nowhere`"),
    ],
)
def test_refusals_name_the_mend(schema: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        prepare(json.dumps(schema))
