"""Grammars in their processes: allowed tokens, refusals, and hostile grammars."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from mla_router.worker.grammar import protocol
from mla_router.worker.grammar.options import GrammarOptions
from mla_router.worker.grammar.pool import GrammarPool, start
from mla_router.worker.grammar.workers import MAX_QUICK
from mla_router.worker.messages import Grammar
from support.grammar_driver import (
    EOS_ID,
    TOKENIZER,
    Refused,
    allowed,
    open_request,
    text,
    wait_for,
    write,
)
from support.tiny_model import VOCAB_SIZE


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-z]{3,8}@[a-z]{2,5}\.(com|org)",
        r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d",
        r"(yes|no|maybe)( indeed)?",
        r"[+-]?(0|[1-9][0-9]{0,5})(\.[0-9]{1,3})?",
        r"[^\n\"]{5}é?",
    ],
)
def test_a_regular_expression_matches_the_whole_text(grammars: GrammarPool, pattern: str) -> None:
    for seed in range(3):
        key = open_request(grammars, Grammar("regex", pattern))
        written = text(write(grammars, key, seed))
        assert re.fullmatch(pattern, written), written
        grammars.close(key)


def test_ebnf(grammars: GrammarPool) -> None:
    source = 'root ::= sum\nsum ::= number (" + " number){2}\nnumber ::= [1-9] [0-9]?'
    key = open_request(grammars, Grammar("ebnf", source))
    written = text(write(grammars, key, 0))
    assert re.fullmatch(r"[1-9]\d? \+ [1-9]\d? \+ [1-9]\d?", written), written
    grammars.close(key)


def test_an_end_is_allowed_where_the_sentence_may_end_and_nowhere_else(
    grammars: GrammarPool,
) -> None:
    key = open_request(grammars, Grammar("regex", "ab?"))
    a, b = TOKENIZER.convert_tokens_to_ids(["a", "b"])
    assert EOS_ID not in allowed(grammars, key, [])
    assert EOS_ID in allowed(grammars, key, [a])
    assert allowed(grammars, key, [b]) == [EOS_ID]
    assert grammars.eos_ids == {EOS_ID}
    grammars.close(key)


def test_masks_of_threads_equal_single_masks(grammars: GrammarPool) -> None:
    grammar = Grammar("regex", "[a-z]{1,3}(-[0-9]{2})?!")
    texts = ["", "a", "abc", "a-", "a-1", "abc-12", "a!", "no-42!"]
    outputs = [list(map(int, TOKENIZER.convert_tokens_to_ids(list(text)))) for text in texts]
    keys = [open_request(grammars, grammar, output) for output in outputs]
    assert len(keys) == len(grammars.masks), "the widest batch there is"
    alone = []
    for key in keys:
        assert not grammars.fill([(key, [])]).failed
        alone.append(grammars.masks[0].copy())
    assert not grammars.fill([(key, []) for key in keys]).failed
    assert (grammars.masks == np.stack(alone)).all()
    assert len({mask.tobytes() for mask in alone}) == 7, "masks that do not differ show nothing"
    for key in keys:
        grammars.close(key)


def test_many_rows_take_several_frames(
    grammars: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "FILL_ROWS", 3)
    grammar = Grammar("regex", "[ab]{9} says the cat on the mat|c")
    a, b, c = (int(token) for token in TOKENIZER.convert_tokens_to_ids(["a", "b", "c"]))
    outputs = [[a], [c], [], [a] * 9, [b, a], [a] * 9, [b], [c]]
    keys = [open_request(grammars, grammar) for _ in outputs]
    stray = TOKENIZER.convert_tokens_to_ids("x")
    outputs[4] = [stray]
    answers = grammars.fill(list(zip(keys, outputs, strict=True)))
    assert list(answers.failed) == [keys[4]]
    assert set(answers.runs) == {keys[3], keys[5]}
    assert answers.runs[keys[3]] == answers.runs[keys[5]]
    bits = np.unpackbits(grammars.masks.view(np.uint8), axis=1, bitorder="little")
    allowed_in = [set(map(int, np.flatnonzero(row))) for row in bits]
    assert allowed_in[1] == allowed_in[7] == {EOS_ID}
    assert allowed_in[3] == allowed_in[5] == {answers.runs[keys[3]][0]}
    assert {a, b} <= allowed_in[0] == allowed_in[6]
    assert {a, b, c} <= allowed_in[2]
    for key in keys:
        grammars.close(key)


def test_without_jump_forward_nothing_is_forced(tokenizer_folder: Path) -> None:
    options = GrammarOptions(jump_forward=False)
    pool = start(tokenizer_folder, vocab_size=VOCAB_SIZE, max_rows=1, options=options)
    try:
        key = open_request(pool, Grammar("regex", "the quick brown fox"))
        answers = pool.fill([(key, [])])
        assert not answers.runs
        bits = np.unpackbits(pool.masks.view(np.uint8), bitorder="little")
        assert bits.sum() > 1, "`t` and all that begins with it"
    finally:
        pool.shut_down()


def test_tokens_that_show_nothing_are_never_allowed(grammars: GrammarPool) -> None:
    """The pattern allows the characters of <|user|>, but the token adds no text."""
    key = open_request(grammars, Grammar("regex", "[<|>a-z]+"))
    hidden = set(TOKENIZER.all_special_ids) | {
        token for token, entry in TOKENIZER.added_tokens_decoder.items() if entry.special
    }
    assert len(hidden) >= 5
    assert hidden.isdisjoint(allowed(grammars, key, []))
    grammars.close(key)


@pytest.mark.parametrize("cut", [0, 1, 5, 127, 128, 129, 300])
def test_an_earlier_output_is_continued(grammars: GrammarPool, cut: int) -> None:
    """A request with earlier output has the same masks as one that generated this output here."""
    whole = [int(token) for token in TOKENIZER.encode("[" + "12, " * 150, add_special_tokens=False)]
    assert len(whole) > 300
    grammar = Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}}')
    here = open_request(grammars, grammar)
    expected = allowed(grammars, here, whole[:cut])
    there = open_request(grammars, grammar, whole[:cut])
    assert allowed(grammars, there, []) == expected
    grammars.close(here)
    grammars.close(there)


def test_output_that_is_not_in_the_grammar_is_refused(grammars: GrammarPool) -> None:
    with pytest.raises(Refused, match="generated before"):
        open_request(grammars, Grammar("regex", "b+"), [TOKENIZER.encode("a")[0]])


def test_a_stray_token_ends_its_own_request_alone(grammars: GrammarPool) -> None:
    grammar = Grammar("regex", "[ab]{9}")
    good = open_request(grammars, grammar)
    bad = open_request(grammars, grammar)
    a, c = TOKENIZER.convert_tokens_to_ids(["a", "c"])
    assert list(grammars.fill([(bad, [c]), (good, [a])]).failed) == [bad]
    grammars.close(bad)
    assert a in allowed(grammars, good, [a])
    grammars.close(good)


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("regex", "(a", "parenthesis"),
        ("regex", r"(a)\1", "Backreference"),
        ("regex", "(?=a)b", "Lookahead"),
        ("regex", r"\Aa", r"`\\A` is not supported"),
        ("regex", "a$b", r"`\$` is supported only at the end"),
        (
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "regex", "pattern": "a^b"}}',
            "only at the beginning",
        ),
        ("ebnf", "root ::= nobody", "not defined"),
        ("ebnf", "", "root"),
        ("ebnf", "][{}", "Unexpected character"),
        ("ebnf", "root ::= root", "no text"),
        ("structural_tag", "{", "JSON"),
        (
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "no"}}',
            "not recognized",
        ),
    ],
)
def test_errors_of_grammars(grammars: GrammarPool, kind: str, source: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason) as refused:
        open_request(grammars, Grammar(kind, source))  # type: ignore[arg-type]
    assert "/" not in str(refused.value).replace("</", ""), "names a file of the library's authors"


@pytest.mark.parametrize("name", ["é" * 100_000, "\\ud800"])
def test_an_error_may_repeat_any_text(grammars: GrammarPool, name: str) -> None:
    with pytest.raises(Refused, match="type") as refused:
        open_request(grammars, Grammar("json_schema", f'{{"type": "{name}"}}'))
    assert len(str(refused.value)) <= protocol.MAX_REASON


BOMBS = {
    "deep schema": ("json_schema", '{"type":"array","items":' * 5000 + "{}" + "}" * 5000),
    "deep regex": ("regex", "(" * 20000 + "a" + ")" * 20000),
    "deep tag": ("structural_tag", "[" * 100000),
    "many properties": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(40000)}}),
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_an_expensive_grammar_is_refused_and_others_continue(
    grammars: GrammarPool, name: str
) -> None:
    other = open_request(grammars, Grammar("regex", "[a-z]+!"))
    kind, source = BOMBS[name]
    with pytest.raises(Refused):
        open_request(grammars, Grammar(kind, source))  # type: ignore[arg-type]
    assert allowed(grammars, other, [])
    grammars.close(other)


def test_a_grammar_that_explodes_while_it_matches_ends_alone(grammars: GrammarPool) -> None:
    """Each letter costs more than the one before. The masks end when they exceed the CPU time."""
    other = open_request(grammars, Grammar("regex", "[a-z]+!"))
    a = TOKENIZER.convert_tokens_to_ids("a")
    grammar = Grammar("ebnf", 'root ::= s "!"\ns ::= s s s | s s | [a-z] | ""')
    with pytest.raises(Refused, match="too much time"):
        bomb = open_request(grammars, grammar)
        for _ in range(5000):
            allowed(grammars, bomb, [a])
    assert allowed(grammars, other, [a])
    with pytest.raises(Refused, match="too much time"):  # remembered, and not compiled again
        open_request(grammars, grammar)
    grammars.close(other)


def test_a_request_can_leave_while_its_grammar_compiles(grammars: GrammarPool) -> None:
    grammar = Grammar("regex", "[x-z]{40}")
    gone = grammars.open(grammar, [])
    stays = grammars.open(grammar, [])
    grammars.close(gone)
    wait_for(grammars, stays)
    assert allowed(grammars, stays, [])
    grammars.close(stays)


def test_more_grammars_than_may_compile_at_once_stand_in_line(grammars: GrammarPool) -> None:
    waiting = [grammars.open(Grammar("regex", f"a{{{n}}}"), []) for n in range(1, 9)]
    open_keys: list[int] = []
    most = 0
    while len(open_keys) < len(waiting):
        most = max(most, sum(worker.is_compiling for worker in grammars._workers))
        open_keys += [key for key, problem in grammars.poll() if problem is None]
    assert most == MAX_QUICK
    assert sorted(open_keys) == waiting
    for key in waiting:
        grammars.close(key)


def test_requests_that_end_before_their_first_step_leave_nothing(grammars: GrammarPool) -> None:
    """Each leaves a matcher in the process. The process hears of their ends without a step."""
    grammar = Grammar("regex", "[a-c]{9}")
    stays = open_request(grammars, grammar)
    for _ in range(50):
        grammars.close(open_request(grammars, grammar))
    worker = grammars._workers.get(grammar)
    assert worker is not None and len(worker._closed) <= 1
    assert allowed(grammars, stays, [])
    grammars.close(stays)


@pytest.mark.parametrize("begun", ["", "x"], ids=["opened", "refused"])
@pytest.mark.parametrize("heard", ["by a step", "by nobody"])
def test_no_result_for_a_closed_request(grammars: GrammarPool, begun: str, heard: str) -> None:
    grammar = Grammar("regex", "[a-c]{900}")
    other = open_request(grammars, grammar)
    left = grammars.open(grammar, TOKENIZER.convert_tokens_to_ids(list(begun)))
    if heard == "by a step":
        grammars.fill([(other, [])])  # the answer to `open` precedes the answer about the masks
    grammars.close(left)
    key = open_request(grammars, Grammar("regex", f"[d-f]{{5}}{begun}"))  # takes its time
    assert not grammars.fill([(other, [])]).failed
    assert grammars.poll() == []
    for each in (other, key):
        grammars.close(each)
