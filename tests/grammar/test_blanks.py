"""The number of blanks in JSON is limited, even if an output was interrupted; other grammars have no limit."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mla_router.worker.grammar.blanks import MAX_BLANKS, BlankRun, BlankTokens
from mla_router.worker.grammar.pool import GrammarPool
from mla_router.worker.messages import Grammar
from support.grammar_driver import EOS_ID, TOKENIZER, allowed, open_request

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"enum": [1, 2]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</a>",
    },
}


def piece(token: int) -> str:
    return str(TOKENIZER.decode([token]))


def longest_run(text: str) -> int:
    longest = run = 0
    for character in text:
        run = run + 1 if character in " \t\r\n" else 0
        longest = max(longest, run)
    return longest


@pytest.mark.parametrize(
    "grammar",
    [Grammar("json_schema", json.dumps(SCHEMA)), Grammar("structural_tag", json.dumps(TAG))],
    ids=lambda grammar: grammar.kind,
)
def test_a_model_that_prefers_blanks_ends_its_answer(
    grammars: GrammarPool, grammar: Grammar
) -> None:
    key = open_request(grammars, grammar)
    tokens: list[int] = []
    new: list[int] = []
    while (may := allowed(grammars, key, new)) and EOS_ID not in may:
        blanks = [token for token in may if not piece(token).strip()]
        new = [max(blanks, key=lambda token: len(piece(token))) if blanks else may[0]]
        tokens += new
        assert len(tokens) < 5000
    grammars.close(key)
    text = str(TOKENIZER.decode(tokens))
    assert MAX_BLANKS <= longest_run(text) < 2 * MAX_BLANKS, text
    json.loads(text.removeprefix("<a>").removesuffix("</a>"))


def test_the_bound_holds_where_an_output_is_taken_up_again(grammars: GrammarPool) -> None:
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    output = TOKENIZER.encode("{", add_special_tokens=False)
    blank = TOKENIZER.encode(" ", add_special_tokens=False)
    for count in (MAX_BLANKS - 1, MAX_BLANKS):
        whole = open_request(grammars, grammar)
        again = open_request(grammars, grammar, output + blank * count)
        may = allowed(grammars, whole, output + blank * count)
        assert may == allowed(grammars, again, [])
        assert (blank[0] in may) == (count < MAX_BLANKS)
        grammars.close(whole)
        grammars.close(again)


def test_a_regex_may_ask_for_as_many_as_it_likes(grammars: GrammarPool) -> None:
    key = open_request(grammars, Grammar("regex", f" {{{3 * MAX_BLANKS}}}x"))
    blank = TOKENIZER.encode(" ", add_special_tokens=False)
    may = allowed(grammars, key, blank * (2 * MAX_BLANKS))
    assert all(not piece(token).strip() for token in may)
    grammars.close(key)


def test_where_nothing_else_is_allowed_blanks_stay() -> None:
    run = BlankRun(BlankTokens([b"a", b" ", b"\n\n", b" b", b""] * 8))
    for _ in range(MAX_BLANKS // 2):
        run.add(2)
    everything = np.full(2, -1, dtype=np.int32)
    run.bound(everything)
    left = np.unpackbits(everything.view(np.uint8), bitorder="little")[:40]
    assert left.tolist() == [1, 0, 0, 1, 1] * 8
    only_blanks = np.array([0b10, 0], dtype=np.int32)
    run.bound(only_blanks)
    assert only_blanks.tolist() == [0b10, 0]
    run.add(3)  # another token that does not end in a blank
    run.bound(everything := np.full(2, -1, dtype=np.int32))
    assert everything.tolist() == [-1, -1]
