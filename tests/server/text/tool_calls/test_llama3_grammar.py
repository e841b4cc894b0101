"""Llama's calls in free text: the grammar of strict functions, compared with the parser."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mla_router.worker.grammar.vocabulary import read_vocabulary
from mla_router.worker.grammar.xgrammar_backend import Compiler
from mla_router.worker.messages import Grammar
from mla_router.worker.server.text.tool_calls.llama3 import LLAMA3
from mla_router.worker.server.text.tool_calls.llama3_grammar import TAG
from support.answers import accepts, parse
from support.tiny_model import tiny_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTIONS = {key: {"type": "json_schema", "json_schema": SCHEMA} for key in ["add", "add-2"]}
GOOD = '{"name": "add", "parameters": {"a": 1}}'
SECOND = '{"name": "add-2", "parameters": {"a": 2}}'


def structural_tag(special: dict[str, int], *, several: bool) -> dict[str, object]:
    calls = LLAMA3.grammar_in_text(FUNCTIONS, special, several=several)
    return {"type": "structural_tag", "format": calls}


ONE = accepts(structural_tag({}, several=False))
SEVERAL = accepts(structural_tag({}, several=True))


@pytest.mark.parametrize(
    "text",
    [
        *("", " \n", "text", "< b", "<|python", "a <|python_tag", "\u3000" + GOOD, "a " + GOOD),
        *('{"name": "Alice", "age": 3}', '{"name": "ad"}', '{"name": "add-"} is a name', "{}"),
        *('{"name": 5, "x": "add"}', '{"names": "add", "parameters": {"a": "x"}}'),
        *('{"name": "a\\ndd", "parameters": {}}', '{"x": {"name": "add", "parameters": {}}}'),
        *('{"answer": 42} and so on', "{% if x %}", '{"é\\u00e9": "\\u00e9"}', TAG, TAG + "{}"),
    ],
)
def test_text_without_calls(text: str) -> None:
    assert ONE(text)
    assert SEVERAL(text)
    assert parse(LLAMA3.parser(FUNCTIONS), [text]).calls == []


@pytest.mark.parametrize(
    "text",
    [
        *(GOOD, " " + GOOD, TAG + GOOD, "Let me see." + TAG + GOOD, "<b>" + TAG + "\n" + GOOD),
        *('{"name":"add","arguments":{"a":-5}}', '{ "name" : "add-2" , "parameters" : {"a": 1} }'),
        '{"type": "function", "name": "add", "parameters": {"a": 1}}',
    ],
)
def test_a_call_that_follows_its_schema(text: str) -> None:
    assert ONE(text)
    assert SEVERAL(text)
    assert SEVERAL(f"{text}; {SECOND}")
    assert not ONE(f"{text}; {SECOND}")
    assert len(parse(LLAMA3.parser(FUNCTIONS), [f"{text}; {SECOND}"]).calls) == 2


@pytest.mark.parametrize("before", ["", "text" + TAG, GOOD + "; "])
@pytest.mark.parametrize(
    "wrong",
    [
        *(
            '{"name": "add", "parameters": {"a": "x"}}',
            '{"name": "add"}',
            '{"name": "add", "x": 1}',
        ),
        *('{"parameters": {}, "name": "add"}', '{"name": "\\u0061dd", "parameters": {}}'),
        *('{"n\\u0061me": "add", "parameters": {}}', '{"name": "x", "name": "add"}'),
        '{"type": "function", "name": "add", "parameters": {}}',
    ],
)
def test_a_call_that_does_not(before: str, wrong: str) -> None:
    assert parse(LLAMA3.parser(FUNCTIONS), [before + wrong]).calls, "the parser takes it for a call"
    assert not SEVERAL(before + wrong)


MARKS = [TAG, "{", "}", '"', '"name"', ": ", '"add"', '"add-2"', ", ", '"parameters"', '{"a": 1}']
MARKS += ['{"a": "x"}', GOOD, SECOND, "{}", '"type": "function"', '{"name": "add', "\\u0061", "\n"]
texts = st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=10).map("".join)


@given(text=texts)
@example(text=TAG + TAG + '{"name": "add", "parameters": {}}')
@example(text="\f" + '{"name": "add", "parameters": {}}')
@example(text='{"name": "add", "parameters": {"a": 1}}{"name": "add", "parameters": {}}')
def test_no_call_escapes_its_schema(text: str) -> None:
    if SEVERAL(text):
        for _, arguments in parse(LLAMA3.parser(FUNCTIONS), [text]).calls:
            jsonschema.validate(json.loads(arguments), SCHEMA)


def test_the_tag_as_a_special_token(tmp_path: Path) -> None:
    """In Llama's tokenizers the tag is a special token: it has no text, and is allowed only where calls may begin."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [TAG]})
    tokenizer.save_pretrained(tmp_path)
    backend, eos, tag = tokenizer.backend_tokenizer, tokenizer.eos_token_id, len(tokenizer) - 1
    compiler = Compiler(read_vocabulary(tmp_path, len(tokenizer)))
    source = json.dumps(structural_tag({TAG: tag}, several=True))
    grammar = Grammar("structural_tag", source)
    compiled = compiler.compile(grammar)
    masks = np.zeros((1, -(-len(tokenizer) // 32)), dtype=np.int32)

    def allowed(*parts: str | int) -> set[int] | None:
        """Returns the tokens that may follow; None if the grammar does not allow `parts`."""
        matcher = compiler.begin(grammar, compiled)
        ids = [[part] if isinstance(part, int) else backend.encode(part).ids for part in parts]
        if not all(map(matcher.accept, itertools.chain(*ids))):
            return None
        matcher.fill(masks, 0)
        bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
        return set(map(int, np.flatnonzero(bits)))

    for before in ((), ("text",), ("<|",)):
        choices = allowed(*before)
        assert choices is not None
        assert tag in choices
        assert allowed(*before, tag, GOOD + "; " + SECOND) is not None
        assert allowed(*before, tag, '{"name": "add", "parameters": {"a": "') is None
    for inside in ((GOOD,), (GOOD[:-5],), ('{"x": "',), (tag,), (tag, '{"x": "')):
        choices = allowed(*inside)
        assert choices is not None
        assert tag not in choices
    assert eos in (allowed(tag, GOOD) or ())
    assert allowed("text", TAG[:5], TAG[5:]) is None, "the parser would read it as the tag"
