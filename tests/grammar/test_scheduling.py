"""Grammars in the step loop: beside everything else that it does, and the same tokens by any way."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from mla_router.worker.grammar.pool import GrammarPool
from mla_router.worker.messages import Abort, Grammar
from mla_router.worker.step.engine import Capacity
from support.fake_engine import continuation
from support.grammar_driver import EOS_ID, TOKENIZER, text
from support.scripted_scheduler import Run, assert_nothing_is_allocated, generate, run
from support.tiny_model import VOCAB_SIZE

DATE = Grammar("regex", r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d")
LIST = Grammar(
    "json_schema",
    '{"type": "array", "items": {"enum": ["red", "green", 1, true]}, "minItems": 3, "maxItems": 6}',
)
# Much of it is forced, and jumped over.
PERSON = Grammar(
    "regex", r'\{"name": "[a-z]{2,4}", "colour": "(turquoise|blue)", "is_here": true\}'
)
BAD = Grammar("regex", "(a")
PROMPT = [7, 8, 9, 10, 11]


def run_all(script: dict[int, list[Any]], grammars: GrammarPool | None, **settings: Any) -> Run:
    outcome = run(script, grammars=grammars, vocab_size=VOCAB_SIZE, **settings)
    assert_nothing_is_allocated(outcome)
    assert outcome.scheduler.stats().compiling == 0
    return outcome


def constrained(rid: str, grammar: Grammar, seed: int = 0, **fields: Any) -> Any:
    stops = frozenset({EOS_ID})
    return generate(
        rid, PROMPT, 90, seed=seed, grammar=grammar, **{"stop_token_ids": stops, **fields}
    )


def answer(outcome: Run, rid: str) -> str:
    assert outcome.channel.reason(rid) == "stop"
    tokens = outcome.channel.tokens(rid)
    assert tokens[-1] == EOS_ID
    return text(tokens)


@pytest.mark.parametrize("overlap", [True, False])
def test_each_request_follows_its_own_grammar_or_none(grammars: GrammarPool, overlap: bool) -> None:
    requests = [
        constrained("date", DATE, 1),
        generate("free", [1, 2, 3], 60, seed=2),
        constrained("list", LIST, 3),
        constrained("date too", DATE, 4),
    ]
    outcome = run_all({0: requests}, grammars, overlap=overlap)
    for rid in ("date", "date too"):
        assert re.fullmatch(DATE.source, answer(outcome, rid))
    assert all(item in ["red", "green", 1, True] for item in json.loads(answer(outcome, "list")))
    assert outcome.channel.tokens("free") == continuation([1, 2, 3], 60, seed=2)


@pytest.mark.parametrize("grammar", [LIST, PERSON])
def test_with_and_without_overlap_in_chunks_and_from_the_cache_it_is_the_same(
    grammars: GrammarPool, grammar: Grammar
) -> None:
    ways: list[dict[str, Any]] = [
        {"overlap": False, "use_prefix_cache": False},
        {"overlap": True},
        {"overlap": True, "chunk_size": 2},
        {"overlap": False, "chunk_size": 3},
    ]
    texts = set()
    for way in ways:
        script = {0: [constrained("a", grammar, 5)], 40: [constrained("b", grammar, 5)]}
        outcome = run_all(script, grammars, **way)
        texts |= {answer(outcome, "a"), answer(outcome, "b")}
    assert len(texts) == 1


@pytest.mark.parametrize("overlap", [True, False])
def test_forced_tokens_need_no_step(grammars: GrammarPool, overlap: bool) -> None:
    outcome = run_all({0: [constrained("a", PERSON, 3)]}, grammars, overlap=overlap)
    assert re.fullmatch(PERSON.source, answer(outcome, "a"))
    assert outcome.scheduler.stats().steps < len(outcome.channel.tokens("a")) / 2


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("grammar", [LIST, PERSON])
def test_an_answer_continues_from_any_token_as_without_a_cut(
    grammars: GrammarPool, overlap: bool, grammar: Grammar
) -> None:
    outcome = run_all({0: [constrained("whole", grammar, 6)]}, grammars, overlap=overlap)
    tokens = outcome.channel.tokens("whole")
    parts = [
        constrained(f"from {cut}", grammar, 6, output=tokens[:cut]) for cut in range(len(tokens))
    ]
    outcome = run_all(dict(enumerate([p] for p in parts)), grammars, overlap=overlap)
    for cut in range(len(tokens)):
        assert outcome.channel.tokens(f"from {cut}") == tokens[cut:]


@pytest.mark.parametrize("overlap", [True, False])
def test_retracted_requests_keep_their_grammar(grammars: GrammarPool, overlap: bool) -> None:
    """Too few pages for all: some wait again in the middle of their sentence."""
    sentence = Grammar("regex", "[a-f]{50}")
    requests = [constrained(f"r{i}", sentence, i) for i in range(4)]
    alone = [
        run_all({0: [request]}, grammars, overlap=overlap).channel.tokens(request.rid)
        for request in requests
    ]
    outcome = run_all(
        {0: list(requests)},
        grammars,
        overlap=overlap,
        capacity=Capacity(num_pages=32, page_size=4, num_slots=4, context_length=128),
        schedule_conservativeness=0.01,
    )
    assert outcome.scheduler.stats().retracted > 0
    for request, tokens in zip(requests, alone, strict=True):
        assert outcome.channel.tokens(request.rid) == tokens


def test_a_sentence_that_has_ended_ends_the_answer_whatever_stops_it_otherwise(
    grammars: GrammarPool,
) -> None:
    outcome = run_all({0: [constrained("a", DATE, stop_token_ids=frozenset())]}, grammars)
    assert re.fullmatch(DATE.source, answer(outcome, "a"))


def test_a_limit_may_come_before_the_end(grammars: GrammarPool) -> None:
    request = generate("a", PROMPT, 3, grammar=Grammar("regex", "[0-9]{20}"))
    outcome = run_all({0: [request]}, grammars)
    assert outcome.channel.reason("a") == "length"
    assert len(outcome.channel.tokens("a")) == 3


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stops", [frozenset({EOS_ID}), frozenset()])
def test_a_sentence_continues_until_min_tokens(
    grammars: GrammarPool, overlap: bool, stops: frozenset[int]
) -> None:
    grammar = Grammar("regex", "[a-f]{1,60}")
    lengths = []
    for seed in range(3):
        requests = [
            constrained(f"{least}", grammar, seed, min_tokens=least, stop_token_ids=stops)
            for least in (0, 25)
        ]
        outcome = run_all({0: list(requests)}, grammars, overlap=overlap)
        assert all(
            re.fullmatch("[a-f]{1,60}", answer(outcome, request.rid)) for request in requests
        )
        lengths.append([len(outcome.channel.tokens(request.rid)) for request in requests])
    assert all(long >= 26 for _, long in lengths), "the end is one more"
    assert any(short < 25 for short, _ in lengths), "none would have ended before"


@pytest.mark.parametrize("overlap", [True, False])
def test_a_sentence_that_must_end_does_so_before_min_tokens(
    grammars: GrammarPool, overlap: bool
) -> None:
    outcome = run_all({0: [constrained("a", DATE, min_tokens=80)]}, grammars, overlap=overlap)
    assert re.fullmatch(DATE.source, answer(outcome, "a"))


def test_a_stop_token_inside_of_a_sentence_still_stops(grammars: GrammarPool) -> None:
    dash = TOKENIZER.convert_tokens_to_ids("-")
    request = constrained("a", DATE, stop_token_ids=frozenset({dash}))
    outcome = run_all({0: [request]}, grammars)
    assert re.fullmatch(r"\d{4}-", text(outcome.channel.tokens("a")))


def test_each_token_has_logprobs(grammars: GrammarPool) -> None:
    outcome = run_all({0: [constrained("a", DATE, logprobs=True)]}, grammars)
    deltas = [d for d in outcome.channel.deltas()["a"] if d.token_ids]
    assert all(d.logprobs and len(d.logprobs.logprobs) == len(d.token_ids) for d in deltas)


def test_a_bad_grammar_is_refused_while_others_run(grammars: GrammarPool) -> None:
    script = {0: [generate("free", [1, 2], 40), constrained("bad", BAD), constrained("a", DATE)]}
    outcome = run_all(script, grammars)
    assert outcome.channel.reason("bad") == "refused"
    assert "parenthesis" in outcome.channel.deltas()["bad"][-1].error
    assert outcome.channel.tokens("free") == continuation([1, 2], 40)
    assert re.fullmatch(DATE.source, answer(outcome, "a"))


def test_a_grammar_that_explodes_is_refused_while_others_run(grammars: GrammarPool) -> None:
    bomb = Grammar("ebnf", 'root ::= s "!"\ns ::= s s s | s s | [^!] | ""')
    capacity = Capacity(num_pages=600, page_size=4, num_slots=4, context_length=2400)
    requests = [
        generate("bomb", PROMPT, 2000, grammar=bomb),
        generate("free", [1, 2], 200),
        constrained("a", DATE),
    ]
    outcome = run_all({0: requests}, grammars, capacity=capacity)
    assert outcome.channel.reason("bomb") == "refused"
    assert outcome.channel.tokens("free") == continuation([1, 2], 200)
    assert re.fullmatch(DATE.source, answer(outcome, "a"))


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8, 13, 40])
def test_an_abort_ends_it_in_any_state(grammars: GrammarPool, at: int) -> None:
    """Early ones come while the grammar compiles: it is a new one each time."""
    grammar = Grammar("regex", f"[a-z]{{{60 + at}}}")
    script = {0: [constrained("a", grammar), constrained("b", DATE)], at: [Abort("a")]}
    outcome = run_all(script, grammars)
    assert outcome.channel.reason("a") == "abort"
    assert re.fullmatch(DATE.source, answer(outcome, "b"))


def test_without_grammars_the_request_ends_and_others_run() -> None:
    script = {0: [constrained("a", DATE), generate("free", [1, 2], 10)]}
    outcome = run_all(script, None)
    assert outcome.channel.reason("a") == "error"
    assert outcome.channel.tokens("free") == continuation([1, 2], 10)
