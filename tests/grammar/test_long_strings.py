"""Long strings have the lengths that their schema allows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar

from mla_router.worker.grammar.long_strings import CHUNK, MAX_REPETITIONS
from mla_router.worker.grammar.vocabulary import Vocabulary
from mla_router.worker.grammar.xgrammar_backend import Compiler
from mla_router.worker.messages import Grammar
from support.tiny_model import tiny_tokenizer

PIECES = [b"", *(bytes([octet]) for octet in range(256)), b'",', b"ab", "éa".encode()]
LIMITS = [
    (0, MAX_REPETITIONS + 1),
    (0, 8 * CHUNK),
    (1, 500),
    (CHUNK, 200),
    (70, 3 * CHUNK),
    (3 * CHUNK, 3 * CHUNK),
    (1000, 1500),
    (130, None),
]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(Vocabulary(PIECES, [0], tiny_tokenizer().backend_tokenizer))


@pytest.mark.parametrize(("least", "most"), LIMITS)
def test_lengths(compiler: Compiler, least: int, most: int | None) -> None:
    schema: dict[str, Any] = {"type": "string", "minLength": least}
    if most is not None:
        schema["maxLength"] = most
    compiled = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    near = {least, most or 2000, CHUNK, 2 * CHUNK, 8 * CHUNK}
    for length in {max(0, size + more) for size in near for more in (-1, 0, 1)}:
        may = least <= length and (most is None or length <= most)
        for letter in ("a", "é"):
            written = json.dumps(letter * length, ensure_ascii=False)
            assert xgrammar.GrammarMatcher(compiled).accept_string(written) == may, length


def test_patterns_of_one_class(compiler: Compiler) -> None:
    schema = {"type": "string", "pattern": rf'^[^"\]]{{0,{2 * MAX_REPETITIONS}}}$'}
    compiled = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    for text, may in (("é" * 256, True), ("a" * 257, False), ("]", False), ("\t", False)):
        assert xgrammar.GrammarMatcher(compiled).accept_string(f'"{text}"') == may
