"""Schemas: the jsonschema library accepts every text that a grammar allows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import xgrammar

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.grammar.errors import GrammarError
from mla_router.worker.grammar.json_schema import prepare
from mla_router.worker.grammar.options import GrammarOptions
from mla_router.worker.grammar.pool import GrammarPool, start
from mla_router.worker.grammar.vocabulary import read_vocabulary
from mla_router.worker.grammar.xgrammar_backend import Compiler
from mla_router.worker.messages import Grammar
from support.grammar_driver import open_request, text, write
from support.tiny_model import VOCAB_SIZE


def obj(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Any:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, **more}


# What is not to be found between strings, numbers and names.
MORE_SPACE = re.compile(r"[^,:] |\s\s|[\n\t]")
LITERAL = re.compile(r'"(\\.|[^"\\])*"|-?[0-9][0-9.eE+-]*|true|false|null')

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
SCHEMAS: dict[str, Any] = {
    "integer": INTEGER,
    "integer range": {"type": "integer", "minimum": -17, "maximum": 1234},
    "integer exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "integer multiple": {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 30},
    "number": {"type": "number"},
    "number range": {"type": "number", "minimum": 0.5, "maximum": 1.5},
    "string": STRING,
    "string length": {"type": "string", "minLength": 3, "maxLength": 5},
    "string pattern": {"type": "string", "pattern": "^[A-F0-9]{4}-(a|b[cd]{1,3})é?$"},
    "string optional end": {"type": "string", "pattern": "^[A-F]{2}(-[a-c]+)?$"},
    "string optional": {"type": "string", "pattern": r"^a?(b\??c*?)??[?\]]{1,2}(?:d|e+)?$"},
    "string escaped": {"type": "string", "pattern": r'^[a-c]"+\\\\\n\x22\u005c/é\x41[^a-z]$'},
    "string of other classes": {
        "type": "string",
        "pattern": r"^.\S[^a]\D\s[\d\s_-][^\D3-7][é\"\\x]$",
    },
    "string date": {"type": "string", "format": "date"},
    "string uuid": {"type": "string", "format": "uuid"},
    "string email": {"type": "string", "format": "email"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "several types": {"type": ["integer", "null", "boolean"]},
    "const": {"const": {"a": [1, "x"]}},
    "enum": {"enum": ["red", 2, None, True, "grün \u2713"]},
    "enum of a type": {"type": "string", "enum": ["home", "work"]},
    "array": {"type": "array", "items": INTEGER},
    "array of a length": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 4},
    "array of anything": {"type": "array"},
    "array of anything, of a length": {"type": "array", "minItems": 1, "maxItems": 2},
    "array of positions": {"type": "array", "prefixItems": [INTEGER, STRING], "items": False},
    "array of arrays": {"type": "array", "items": {"type": "array", "items": {"type": "null"}}},
    "object": obj({"name": STRING, "age": INTEGER}),
    "object in an object": obj(
        {"at": obj({"x": INTEGER, "y": INTEGER}), "on": {"type": "boolean"}}
    ),
    "object of optionals": obj({"a": INTEGER, "b": INTEGER, "c": INTEGER}, ["b"]),
    "object and more": obj({"a": INTEGER}, additionalProperties={"type": "boolean"}),
    "object and no more": obj({"a": INTEGER}, additionalProperties=False),
    "object of anything": {"type": "object"},
    "object by pattern": {
        "type": "object",
        "patternProperties": {"^k_[a-z]$": INTEGER},
        "additionalProperties": False,
    },
    "object by escaped pattern": {
        "type": "object",
        "patternProperties": {'^k"x?[a-z]$': INTEGER},
        "additionalProperties": False,
    },
    "object by count": {
        "type": "object",
        "additionalProperties": INTEGER,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "object of names": {
        "type": "object",
        "propertyNames": {"type": "string", "pattern": "^[a-c]+$"},
    },
    "unicode keys": obj(
        {"ключ": INTEGER, "é ü": STRING, 'say "hi"\n': {"type": "null"}, "": INTEGER}
    ),
    "any of": {"anyOf": [INTEGER, obj({"v": STRING}), {"type": "null"}]},
    "one of": {"oneOf": [obj({"k": {"const": "a"}}), obj({"k": {"const": "b"}, "n": INTEGER})]},
    "all of one": {"allOf": [obj({"a": INTEGER})]},
    "reference": {
        "$defs": {"p": obj({"x": INTEGER})},
        "type": "array",
        "items": {"$ref": "#/$defs/p"},
    },
    "old reference": {"definitions": {"p": INTEGER}, "$ref": "#/definitions/p"},
    "reference to a property": obj({"a b": obj({"x": INTEGER}), "c": {"$ref": "#/properties/a b"}}),
    "recursion": {
        "$defs": {
            "tree": obj({"v": INTEGER, "of": {"type": "array", "items": {"$ref": "#/$defs/tree"}}})
        },
        "$ref": "#/$defs/tree",
    },
    "tool call": obj(
        {
            "name": {"const": "get_weather"},
            "arguments": obj({"city": STRING, "unit": {"enum": ["celsius", "fahrenheit"]}}),
        },
        additionalProperties=False,
    ),
    "with annotations": {
        **INTEGER,
        "title": "T",
        "description": "D",
        "default": 3,
        "examples": [1],
    },
    "anything": {},
    "true": True,
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_are_valid(grammars: GrammarPool, name: str) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for seed in range(4):
        key = open_request(grammars, Grammar("json_schema", json.dumps(schema)))
        written = text(write(grammars, key, seed))
        validator.validate(json.loads(written))
        grammars.close(key)


@pytest.fixture(scope="module")
def compact(tokenizer_folder: Path) -> Iterator[GrammarPool]:
    options = GrammarOptions(any_whitespace=False)
    pool = start(tokenizer_folder, vocab_size=VOCAB_SIZE, max_rows=1, options=options)
    yield pool
    pool.shut_down()


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("in_tag", [False, True])
def test_compact_json_is_valid_and_has_blanks_only_behind_commas_and_colons(
    compact: GrammarPool, name: str, in_tag: bool
) -> None:
    schema = SCHEMAS[name]
    grammar = Grammar("json_schema", json.dumps(schema))
    if in_tag:
        content = {"type": "json_schema", "json_schema": schema}
        tag = {"type": "tag", "begin": "", "content": content, "end": "!"}
        whole = {"type": "structural_tag", "format": tag}
        grammar = Grammar("structural_tag", json.dumps(whole))
    key = open_request(compact, grammar)
    written = text(write(compact, key, 0)).removesuffix("!" if in_tag else "")
    value = json.loads(written)
    jsonschema.Draft202012Validator(schema).validate(value)
    assert not MORE_SPACE.search(LITERAL.sub("0", written)), written
    compact.close(key)


@pytest.mark.parametrize("in_tag", [False, True])
def test_letters_before_hexadecimal_digits_are_kept(in_tag: bool) -> None:
    """xgrammar writes é as \\xe9, and reads `\\xe9a` as one letter."""
    words = [chr(code) + digit for code in range(0x80, 0x180) for digit in "0aF"]
    schema = {"enum": [*words, "\\xe9a"]}
    grammar = Grammar("json_schema", json.dumps(schema))
    if in_tag:
        tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
        grammar = Grammar("structural_tag", json.dumps(tag))
    compiled = Compiler(read_vocabulary(SMALL_MODEL, 1024)).compile(grammar)
    for word in schema["enum"]:
        written = json.dumps(word, ensure_ascii=False)
        assert xgrammar.GrammarMatcher(compiled).accept_string(written), word


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"minimum": 4}, "`minimum` is supported only together with `type`: integer or number"),
        ({"type": "object", "required": ["a"]}, "names `a`, which is none of `properties`"),
        ({"$ref": "http://example.com/schema"}, "a place in this schema"),
        (
            obj({"list": {"type": "array", "items": {"not": INTEGER}}}),
            "^/properties/list/items: `not`",
        ),
        ({"minItems": 1}, "`minItems` is supported only together with `type`: array"),
        ({"patternProperties": {"^a$": INTEGER}}, "only together with `type`: object"),
        ({"type": "number", "multipleOf": 2}, "`multipleOf` is supported only"),
        ({"type": ["integer", "number"], "multipleOf": 2}, "only of an integer"),
        ({"type": "integer", "multipleOf": 0.5}, "`multipleOf` must be a whole number"),
        ({"type": "integer", "multipleOf": 1025}, "`multipleOf` above 1024 is supported only betw"),
        ({"enum": [1, 2], "multipleOf": 0}, "`multipleOf` must be greater than 0"),
        ({"type": "integer", "minimum": 1e999}, "`minimum` is out of range"),
        ({"type": "integer", "maximum": float("nan")}, "`maximum` is out of range"),
        (
            {"type": "string", "format": "date", "maxLength": 3},
            "`format` .* together with `maxLength`",
        ),
        (
            {"type": "string", "format": "date", "pattern": "1"},
            "`format` .* together with `pattern`",
        ),
        ({"type": "string", "pattern": "^(?!a)[a-c]$"}, "lookaheads are not supported"),
        ({"type": "string", "pattern": "a^b"}, r"`\^` is supported only at the beginning"),
        ({"type": "string", "pattern": ["a"]}, "`pattern` must be a regular expression"),
        ({"type": "string", "maxLength": "3"}, "`maxLength` must be a whole number"),
        ({"type": "object", "patternProperties": {"(?=a)": {}}}, "lookaheads"),
        (
            {**obj({"a": INTEGER}), "patternProperties": {r"^\u{61}$": {}}},
            "not supported with .* together with `properties`",
        ),
        ({"required": [{"a": 1}]}, "`required` must be a list of names"),
        ({"required": "a"}, "`required` must be a list of names"),
        ({"enum": 5}, "`enum` must be a list"),
        (obj({"a": {"$ref": "#/hidden"}}, hidden={"not": {}}), "`#/hidden`, where there is no"),
        ({"$ref": "#/$defs/b", "$defs": {"a": {}}}, "where there is no schema"),
        ([], "must be an object"),
        ({"properties": {"a": 3}}, "^/properties/a: must be an object"),
    ],
)
def test_refusals_name_the_place(schema: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        prepare(json.dumps(schema))


@pytest.mark.parametrize("source", ["", "{", "{'a': 1}", '{"a": 1}}', "\0", "[" * 100_000])
def test_invalid_json_is_refused(source: str) -> None:
    with pytest.raises(GrammarError, match=r"JSON|nested"):
        prepare(source)


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    prepare(json.dumps(obj({"not": STRING, "required": INTEGER, "$ref": STRING, "enum": STRING})))
