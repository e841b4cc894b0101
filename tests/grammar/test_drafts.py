"""Masks behind drafts are those of an output that has taken the drafts, which are then forgotten."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.grammar import protocol
from mla_router.worker.grammar.blanks import MAX_BLANKS
from mla_router.worker.grammar.grammar_worker import _fill
from mla_router.worker.grammar.jump_forward import ForcedTokens, Output
from mla_router.worker.grammar.pool import GrammarPool
from mla_router.worker.grammar.protocol import Fill, Row
from mla_router.worker.grammar.vocabulary import read_vocabulary
from mla_router.worker.grammar.xgrammar_backend import BatchFiller, Compiler
from mla_router.worker.messages import Grammar
from support.grammar_driver import TOKENIZER, open_request

DRAFTS = 4
VOCABULARY = read_vocabulary(SMALL_MODEL, 1024)
FORCED = ForcedTokens(VOCABULARY)
FILLER = BatchFiller(1)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "favourite_colour": {"enum": ["turquoise", "turmeric", "blue"]},
        "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "favourite_colour", "ages"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", "[ab]{3,5}, ladies and gentlemen(, twice)?"),
]


@cache
def compiled(grammar: Grammar) -> tuple[Compiler, Any]:
    compiler = Compiler(VOCABULARY)
    return compiler, compiler.compile(grammar)


def output_of(grammar: Grammar, tokens: list[int]) -> Output:
    compiler, source = compiled(grammar)
    output = Output(compiler.begin(grammar, source), FORCED)
    assert all(output.accept(token) for token in tokens)
    return output


def choices_after(grammar: Grammar, tokens: list[int]) -> list[int]:
    """Returns the tokens that may follow, with those of a run alone; none behind the end."""
    output = output_of(grammar, tokens)
    if output.run:
        return [output.run[0]]
    if output.matcher.is_terminated:
        return []
    masks = np.zeros((1, 32), dtype=np.int32)
    output.matcher.fill(masks, 0)
    return allowed_by(masks[0])


def allowed_by(mask: np.ndarray) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=["schema", "regex"])
@pytest.mark.parametrize("seed", range(3))
def test_masks_are_those_of_an_output_that_has_taken_the_drafts(
    grammar: Grammar, seed: int
) -> None:
    rng = random.Random(seed)
    outputs = {0: output_of(grammar, [])}
    masks = np.zeros((1 + DRAFTS, 32), dtype=np.int32)
    text: list[int] = []
    new: list[int] = []
    sizes = set[int]()
    while choices := choices_after(grammar, text):
        drafts, expected = list[int](), [choices]
        while len(drafts) < DRAFTS:
            # A wrong one now and then, behind which there is no mask
            right = rng.random() < 0.9
            drafts.append(rng.choice(expected[-1] if right else range(1024)))
            followers: list[int] = []
            if len(expected) == len(drafts) and drafts[-1] in expected[-1]:
                followers = choices_after(grammar, text + drafts)
            is_forced = bool(output_of(grammar, text + drafts[: len(expected) - 1]).run)
            if not followers or is_forced:
                drafts += rng.choices(range(1024), k=DRAFTS - len(drafts))
                break
            expected.append(followers)
        filled = _fill(Fill([Row(0, 0, new, drafts)]), outputs, masks, FILLER)
        count = filled.counts.get(0, 1)
        assert not filled.strays
        assert bool(filled.runs) == bool(output_of(grammar, text).run)
        assert [allowed_by(mask) for mask in masks[:count]] == expected
        sizes.add(count)
        # As the device accepts: drafts, then a token of its own
        new = drafts[: rng.randrange(count)]
        new.append(rng.choice(expected[len(new)]))
        text += new
        assert len(text) < 2000
    assert 1 in sizes and len(sizes) > 2
    assert all(outputs[0].accept(token) for token in new)
    assert outputs[0].matcher.is_terminated


def test_blanks_of_drafts_are_not_counted() -> None:
    """Else a run of blanks, of which most are drafts that were not accepted, would end the blanks of the text."""
    blank = VOCABULARY.pieces.index(b" ")
    outputs = {0: output_of(Grammar("json_schema", "{}"), VOCABULARY.encode("["))}
    masks = np.zeros((1 + DRAFTS, 32), dtype=np.int32)
    for _ in range(MAX_BLANKS // DRAFTS + 2):
        filled = _fill(Fill([Row(0, 0, [], [blank] * DRAFTS)]), outputs, masks, FILLER)
        assert filled.counts == {0: 1 + DRAFTS}
        assert all(blank in allowed_by(mask) for mask in masks)
    assert outputs[0].matcher.num_blanks == 0


def test_rows_with_drafts_lie_behind_each_other(
    grammars: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the processes of two grammars, and in several frames."""
    monkeypatch.setattr(protocol, "FILL_ROWS", 1)
    a, b, c = (int(token) for token in TOKENIZER.convert_tokens_to_ids(["a", "b", "c"]))
    some, other = Grammar("regex", "[ab]c[ab]c"), Grammar("regex", "c?[a]{2}")
    keys = [open_request(grammars, grammar) for grammar in (some, other, some)]
    drafts = [[a, c], [], [b, b]]
    answers = grammars.fill([(key, []) for key in keys], drafts)
    assert (answers.counts[keys[0]], answers.counts[keys[2]]) == (3, 2)
    assert answers.counts.get(keys[1], 1) == 1

    def single(row: int) -> set[int]:
        return set(allowed_by(grammars.masks[row])) & {a, b, c}

    # Rows 0 to 2 are of the first key, 3 of the second, 4 to 6 of the third, whose last draft is refused
    assert [single(row) for row in (0, 1, 2, 3, 4, 5)] == [
        {a, b},
        {c},
        {a, b},
        {c, a},
        {a, b},
        {c},
    ]
    again = grammars.fill([(keys[0], [b, c]), (keys[2], [])], [[], [a]])
    assert not again.failed
    assert [single(row) for row in range(3)] == [{a, b}, {a, b}, {c}]
    for key in keys:
        grammars.close(key)
