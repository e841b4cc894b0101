"""Specialised grammars of JSON schemas have the same masks as xgrammar's own."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import numpy as np
import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from mla_router.worker.grammar.specialize import MAX_STRINGS, specialize
from support.examples import examples

# Tokens that end strings, arrays and objects, and go on: what masks have to look ahead for.
_MARKS = ['"', ",", "]", "}", ":", " ", "\n", "\\", "[", "{", "a", "1", "é"]
_WORDS = ['"a"', '"b":', '": "', '", "', '"]}', '\\"', "\\u00e9", "null", "true", "-1.5e3", "\x1f"]
PIECES = [
    b"",
    *("".join(marks).encode() for n in (1, 2, 3) for marks in itertools.product(_MARKS, repeat=n)),
    *(word.encode() for word in _WORDS),
    *(bytes([octet]) for octet in range(256)),
    *(bytes([lead, second]) for lead in range(0xC0, 0x100) for second in range(0x70, 0xD0)),
    "é".encode()[1:] + b'",',
]
PIECES += [b""] * (-len(PIECES) % 32)
VOCABULARY = xgrammar.TokenizerInfo(
    PIECES, xgrammar.VocabType.RAW, vocab_size=len(PIECES), stop_token_ids=[0]
)

STRING = {"type": "string"}
PERSON = {
    "type": "object",
    "properties": {"a": STRING, "b": {"anyOf": [STRING, {"type": "null"}]}},
    "required": ["a", "b"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "string": STRING,
    "object": PERSON,
    "optional": {
        "type": "object",
        "properties": {"a": STRING, "b": {"type": "number"}, "c": STRING},
    },
    "open": {"type": "object", "properties": {"a": STRING}, "additionalProperties": STRING},
    "any": {"type": "object"},
    "array": {"type": "array", "items": {"type": "array", "items": STRING}},
    "at least": {"type": "array", "items": PERSON, "minItems": 2},
    "at most": {"type": "array", "items": STRING, "maxItems": 3},
    "tuple": {
        "type": "array",
        "prefixItems": [STRING, {"type": "integer"}, STRING],
        "items": False,
    },
    "list": {
        "$defs": {
            "a": {
                "type": "object",
                "properties": {"a": STRING, "b": {"anyOf": [{"$ref": "#/$defs/a"}, STRING]}},
                "required": ["a"],
            }
        },
        "$ref": "#/$defs/a",
    },
    "names": {
        "type": "object",
        "properties": {
            'a" basic_string {0, -1}] | (': STRING,
            "\u2028\n": {"const": "basic_string"},
        },
        "required": ['a" basic_string {0, -1}] | (', "\u2028\n"],
    },
    "limited": {
        "type": "object",
        "properties": {
            "a": {"type": "string", "minLength": 1, "maxLength": 3},
            "b": {"type": "string", "pattern": '^[a"]+$'},
        },
        "required": ["a", "b"],
    },
}


def schemas() -> SearchStrategy[dict[str, Any]]:
    scalars: SearchStrategy[dict[str, Any]] = st.sampled_from(
        [STRING, STRING, {"type": "integer"}, {"type": "boolean"}, {"enum": ["a", 'a"', 1]}]
    )

    def larger(inner: SearchStrategy[dict[str, Any]]) -> SearchStrategy[dict[str, Any]]:
        return (
            st.fixed_dictionaries(
                {
                    "type": st.just("object"),
                    "properties": st.dictionaries(
                        st.sampled_from("abcd"), inner, min_size=1, max_size=3
                    ),
                    "required": st.lists(st.sampled_from("abcd"), unique=True),
                }
            ).map(lambda s: {**s, "required": [n for n in s["required"] if n in s["properties"]]})
            | st.fixed_dictionaries(
                {"type": st.just("array"), "items": inner, "minItems": st.integers(0, 2)}
            )
            | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)})
        )

    return st.recursive(scalars, larger, max_leaves=8)


def own(schema: dict[str, Any], any_whitespace: bool) -> str:
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=any_whitespace)
    return str(grammar)


def assert_same_masks(schema: dict[str, Any], any_whitespace: bool, *seeds: int) -> None:
    """Compares the masks along random texts. Half of the tokens end a string, an array or an object."""
    compiler = xgrammar.GrammarCompiler(VOCABULARY, max_threads=1)
    theirs = compiler.compile_json_schema(json.dumps(schema), any_whitespace=any_whitespace)
    ours = compiler.compile_grammar(specialize(own(schema, any_whitespace)))
    for seed in seeds:
        follow(xgrammar.GrammarMatcher(theirs), xgrammar.GrammarMatcher(ours), seed)


def follow(theirs: xgrammar.GrammarMatcher, ours: xgrammar.GrammarMatcher, seed: int) -> None:
    masks = np.zeros((2, len(PIECES) // 32), dtype=np.int32)
    choose = random.Random(seed)
    text = b""
    for _ in range(60):
        theirs.fill_next_token_bitmask(masks, 0)
        ours.fill_next_token_bitmask(masks, 1)
        assert (masks[0] == masks[1]).all(), text
        assert forced(ours) == forced(theirs), text
        allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
        closing = [token for token in allowed if any(mark in PIECES[token] for mark in b'"]}')]
        token = int(choose.choice(closing if closing and choose.random() < 0.5 else allowed))
        assert theirs.accept_token(token)
        assert ours.accept_token(token)
        if theirs.is_terminated():
            assert ours.is_terminated()
            return
        text += PIECES[token]


def forced(matcher: xgrammar.GrammarMatcher) -> str | None:
    try:
        return str(matcher.find_jump_forward_string())
    except UnicodeDecodeError:
        return None


@pytest.mark.parametrize("any_whitespace", [True, False])
@pytest.mark.parametrize("name", SCHEMAS)
def test_masks_of_each_kind_of_schema(name: str, any_whitespace: bool) -> None:
    assert_same_masks(SCHEMAS[name], any_whitespace, *range(3))


@examples(60, deadline=None)
@given(schemas(), st.booleans(), st.integers(0, 1000))
def test_masks_of_random_schemas(schema: dict[str, Any], any_whitespace: bool, seed: int) -> None:
    assert_same_masks(schema, any_whitespace, seed)


@pytest.mark.parametrize(
    "name", ["object", "optional", "array", "at least", "tuple", "list", "names"]
)
@pytest.mark.parametrize("any_whitespace", [True, False])
def test_strings_have_rules_of_their_own(name: str, any_whitespace: bool) -> None:
    """Without this the masks would be right, but not faster."""
    for line in specialize(own(SCHEMAS[name], any_whitespace)).splitlines():
        rule, _, body = line.partition(" ::= ")
        terms = re.sub(r'"(?:\\.|[^"\\])*"', "", body)
        assert rule.startswith("basic_") or "basic_string" not in terms, line


def test_so_many_strings_and_no_more() -> None:
    properties = {f"p{i}": STRING for i in range(MAX_STRINGS + 10)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    grammar = specialize(own(schema, True))
    assert grammar.count("\nstring_") == MAX_STRINGS
    assert len(re.findall(r"\bbasic_string root_", grammar)) == 10
    assert_same_masks(schema, True, 0)


def test_unknown_grammars_stay_unchanged() -> None:
    assert specialize('root ::= (("a"))\n') == 'root ::= (("a"))\n'
    other = own(SCHEMAS["object"], True).replace('"u" [A-Fa-f0-9]', '"u" [a-f0-9]', 1)
    assert specialize(other) == other
