"""Forced tokens: xgrammar's masks allow no others, and an interrupted sentence has the same tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.grammar.jump_forward import MIN_RUN, ForcedTokens, Output
from mla_router.worker.grammar.protocol import RUN_TOKENS
from mla_router.worker.grammar.vocabulary import Vocabulary, read_vocabulary
from mla_router.worker.grammar.xgrammar_backend import Compiler, Matcher
from mla_router.worker.messages import Grammar

VOCABULARY = read_vocabulary(SMALL_MODEL, 1024)
FORCED = ForcedTokens(VOCABULARY)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "favourite_colour": {"enum": ["turquoise", "turmeric", "blue"]},
        "address": {
            "type": "object",
            "properties": {"street_number": {"type": "integer", "maximum": 99, "minimum": 0}},
            "required": ["street_number"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "favourite_colour", "address"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "The person is <person>"},
            {"type": "json_schema", "json_schema": PERSON},
            {"type": "const_string", "value": "</person>"},
        ],
    },
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(PERSON)),
    Grammar("structural_tag", json.dumps(TAG)),
    Grammar("regex", "(Good (morning|evening), ladies and gentlemen[.!] ){2}"),
    Grammar("regex", "naïve (日本語|日光) and crème brûlée(, please)?"),
    Grammar("ebnf", 'root ::= "begin " ("end" | "begin again, and then the end")'),
]


@cache
def compiled(grammar: Grammar, any_whitespace: bool = False) -> object:
    return Compiler(VOCABULARY, any_whitespace=any_whitespace).compile(grammar)


def begin(grammar: Grammar, any_whitespace: bool = False) -> Output:
    return Output(matcher(grammar, any_whitespace), FORCED)


def matcher(grammar: Grammar, any_whitespace: bool = False) -> Matcher:
    return Matcher(compiled(grammar, any_whitespace))  # type: ignore[arg-type]


def allowed(matcher: Matcher) -> list[int]:
    masks = np.zeros((1, len(VOCABULARY.pieces) // 32), dtype=np.int32)
    matcher.fill(masks, 0)
    return [int(t) for t in np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))]


def write(output: Output, choose: random.Random) -> tuple[list[int], list[list[int]]]:
    """Draws a random sentence with its forced runs."""
    tokens: list[int] = []
    runs: list[list[int]] = []
    while not output.matcher.is_terminated:
        if output.run:
            new = list(output.run)
            runs.append(new)
        else:
            new = [choose.choice(allowed(output.matcher))]
        for token in new:
            assert output.accept(token)
        tokens += new
        assert len(tokens) < 8000
    return tokens, runs


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("any_whitespace", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_masks_allow_nothing_but_the_text_of_a_run(
    grammar: Grammar, any_whitespace: bool, seed: int
) -> None:
    tokens, runs = write(begin(grammar, any_whitespace), random.Random(seed))
    assert all(MIN_RUN <= len(run) <= RUN_TOKENS for run in runs)
    plain = matcher(grammar, any_whitespace)
    output = begin(grammar, any_whitespace)
    for token in tokens:
        choices = allowed(plain)
        assert token in choices
        rest = b"".join(VOCABULARY.pieces[forced] for forced in output.run)
        for choice in choices if rest else ():
            piece = VOCABULARY.pieces[choice]
            assert piece, "the sentence may not end here"
            assert piece.startswith(rest) or rest.startswith(piece)
        assert plain.accept(token)
        assert output.accept(token)


def text_of(run: Iterable[int]) -> str:
    return b"".join(VOCABULARY.pieces[token] for token in run).decode()


def test_schemas_force_their_keys() -> None:
    output = begin(GRAMMARS[0])
    assert text_of(output.run) == '{"name":'
    expected = [(' "Ann",', ' "favourite_colour":'), (' "b', 'lue", "address": {"street_number":')]
    for text, forced in expected:
        assert all(output.accept(t) for t in [*output.run, *VOCABULARY.encode(text)])
        assert text_of(output.run) == forced


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_runs_are_written_as_the_tokenizer_would(grammar: Grammar) -> None:
    _, runs = write(begin(grammar), random.Random(1))
    assert runs
    tokenizer = Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
    for run in runs:
        assert tokenizer.encode(tokenizer.decode(run), add_special_tokens=False).ids == run


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_an_interrupted_sentence_has_the_same_runs(grammar: Grammar) -> None:
    tokens, runs = write(begin(grammar), random.Random(2))
    assert runs, "nothing was forced"
    whole = begin(grammar)
    for cut in range(len(tokens)):
        again = begin(grammar)
        assert all(again.accept(token) for token in tokens[:cut])
        assert again.run == whole.run
        whole.accept(tokens[cut])


def test_an_output_that_was_not_forced_is_taken_as_it_is() -> None:
    """The earlier output comes from a worker with --disable-jump-forward, letter by letter."""
    letters = [VOCABULARY.pieces.index(bytes([byte])) for byte in b'{"name": "Ann", ']
    output = begin(GRAMMARS[0])
    assert all(output.accept(token) for token in letters)
    assert text_of(output.run).startswith('"favourite_colour":')


@pytest.mark.parametrize(
    ("source", "before", "forced"),
    [
        ("(abc|abd)", "", False),  # one or two tokens: too short for a run
        ("one fine day(, or so)?", "one fine day", False),  # it may end here
        ("[ab]{3}", "a", False),
        ("(é|è).*", "", False),  # only a byte is certain, not a character
        ("one fine day in a large forest", "", True),
    ],
)
def test_forced_text(source: str, before: str, forced: bool) -> None:
    output = begin(Grammar("regex", source))
    assert all(output.accept(token) for token in VOCABULARY.encode(before))
    assert bool(output.run) is forced


@pytest.mark.parametrize("before", ["", "one fine day in a large forest "])
def test_a_marker_is_not_written_in_parts(before: str) -> None:
    """Both markers begin with <｜tool▁call. The model chooses between their tokens."""
    begins, ends = "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"
    output = begin(Grammar("ebnf", f'root ::= "{before}" ("{begins}" | "{ends}")'))
    for token in VOCABULARY.encode(before):
        assert not output.run or output.run[0] == token
        assert output.accept(token)
    assert not output.run
    assert {*VOCABULARY.encode(begins + ends)} <= {*allowed(output.matcher)}


@pytest.mark.parametrize("words", ["In winter the days are short. ", "a🎉"])
def test_long_text_is_split_into_runs(words: str) -> None:
    """The second text has a token for each byte, so a run of RUN_TOKENS would end within a character."""
    text = words * 300
    output = begin(Grammar("ebnf", f'root ::= "{text}"'))
    _, runs = write(output, random.Random(0))
    assert RUN_TOKENS - 4 < max(map(len, runs)) <= RUN_TOKENS
    assert len(runs) > 10


def test_without_forced_tokens_nothing_is() -> None:
    assert not Output(matcher(GRAMMARS[0]), None).run


def test_tokenizers_that_change_the_text_force_nothing(tmp_path: Path) -> None:
    """A tokenizer that adds a blank before every text."""
    letters = {chr(code): code - 0x60 for code in range(0x61, 0x7B)}
    tokenizer = Tokenizer(models.BPE(vocab={"<eos>": 0, "▁": 27, **letters}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')

    def vocabulary() -> Vocabulary:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return read_vocabulary(tmp_path, 28)

    assert ForcedTokens(vocabulary()).run("abcdefgh") == ([1, 2, 3, 4, 5, 6, 7], "h")
    tokenizer.normalizer = normalizers.Prepend("▁")
    assert ForcedTokens(vocabulary()).run("abcdefgh") == ([], "")


def test_tokenizers_that_cut_and_fill_up_texts_do_not_here(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
    text = "In winter the days are short, in summer the nights are."
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    assert read_vocabulary(tmp_path, 1024).encode(text) == expected
