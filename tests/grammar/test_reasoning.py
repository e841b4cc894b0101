"""Free reasoning before a grammar."""

from __future__ import annotations

import json

import pytest

from mla_router.worker.grammar.pool import GrammarPool
from mla_router.worker.messages import Grammar
from mla_router.worker.server.validation.constraint import Constraint
from support.grammar_driver import EOS_ID, TOKENIZER, allowed, open_request

FORMAT = {"type": "regex", "pattern": "b+"}


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        (Grammar("json_schema", '{"type": "integer"}'), "12"),
        (Grammar("regex", "b+"), "bb"),
        (Grammar("ebnf", 'root ::= "b" root | "b"'), "bb"),
        (
            Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": FORMAT})),
            "bb",
        ),
    ],
)
def test_thoughts_are_free_and_the_answer_is_not(
    grammars: GrammarPool, grammar: Grammar, sentence: str
) -> None:
    key = open_request(grammars, Constraint(grammar, "").after("</think>").grammar)
    thoughts = TOKENIZER.encode("a <b> or {", add_special_tokens=False)
    free = allowed(grammars, key, [])
    assert len(free) > 250
    assert EOS_ID not in allowed(grammars, key, thoughts)
    end = TOKENIZER.encode("</think>\n\n", add_special_tokens=False)
    first = allowed(grammars, key, end)
    assert EOS_ID not in first
    assert len(first) < 60
    assert TOKENIZER.encode("\xa0", add_special_tokens=False)[0] not in first
    assert EOS_ID in allowed(grammars, key, TOKENIZER.encode(sentence, add_special_tokens=False))
    grammars.close(key)
