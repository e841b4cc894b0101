"""Decode rows that give none, one or several tokens: the text is that of one token at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from mla_router.worker.messages import Abort, ToScheduler
from mla_router.worker.step.engine import Capacity
from support.fake_engine import FakeEngine, continuation
from support.faulty_engine import FaultyEngine
from support.scripted_scheduler import Run, assert_nothing_is_allocated, generate, run

MOST = 3
CAPACITY = Capacity(64, 4, 8, 128, tokens_per_row=MOST)
PROMPT = [5, 6, 7, 8, 9]


def with_counts(engine: FakeEngine, count: Callable[[], int]) -> FakeEngine:
    engine.count = count  # type: ignore[method-assign]
    return engine


def sizes(outcome: Run, rid: str) -> list[int]:
    """Returns the number of tokens of each delta."""
    return [len(delta.token_ids) for delta in outcome.channel.deltas()[rid]]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_text_is_that_of_one_token_at_a_time(overlap: bool, page_size: int) -> None:
    """In little memory, with stops and aborts in the middle."""
    draw = random.Random(page_size)
    script: dict[int, list[ToScheduler]] = {}
    expected, aborted = {}, set()
    for n in range(60):
        rid, prompt = f"r{n}", [n % 50, *draw.choices(range(50), k=draw.randint(1, 20))]
        most = draw.randint(1, 30)
        stops = frozenset(draw.choices(range(50), k=draw.choice([0, 4])))
        begun = continuation(prompt, draw.randint(0, most - 1), n) if not stops else []
        expected[rid] = continuation(prompt, most - len(begun), n, stops, begun)
        sampling = {"seed": n, "stop_token_ids": stops, "output": begun, "logprobs": n % 3 == 0}
        arrival = draw.randrange(40)
        script.setdefault(arrival, []).append(generate(rid, prompt, most, **sampling))
        if draw.random() < 0.2:
            aborted.add(rid)
            script.setdefault(arrival + draw.randrange(1, 30), []).append(Abort(rid))
    outcome = run(
        script,
        overlap=overlap,
        capacity=replace(CAPACITY, num_pages=96 // page_size, page_size=page_size),
        schedule_conservativeness=0.01,
    )
    assert outcome.scheduler.stats().retracted > 0
    generated = 0
    for n, (rid, want) in enumerate(expected.items()):
        got = outcome.channel.tokens(rid)
        generated += len(got)
        reason = outcome.channel.reason(rid)
        if reason == "abort":
            assert rid in aborted
            assert got == want[: len(got)]
        else:
            assert got == want
        logprobs = [delta.logprobs for delta in outcome.channel.deltas()[rid] if delta.token_ids]
        told = [value for some in logprobs if some for value in some.logprobs]
        assert told == ([-float(token) for token in got] if n % 3 == 0 else [])
    assert generated == outcome.scheduler.stats().generated_tokens
    assert_nothing_is_allocated(outcome)


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_after_a_stop_are_dropped(overlap: bool) -> None:
    want = continuation(PROMPT, 12)
    at = next(i for i, token in enumerate(want) if i % MOST == 2 and token not in want[:i])
    request = generate("r", PROMPT, 40, stop_token_ids=frozenset([want[at]]), logprobs=True)
    engine = with_counts(FakeEngine(CAPACITY), lambda: MOST)
    outcome = run({0: [request]}, engine=engine, capacity=CAPACITY, overlap=overlap)
    # The prompt gives one token, so `at` is the second of three
    assert sizes(outcome, "r") == [1, *[MOST] * (at // MOST), 2]
    assert outcome.channel.tokens("r") == want[: at + 1]
    assert outcome.channel.reason("r") == "stop"
    last = outcome.channel.deltas()["r"][-1].logprobs
    assert last is not None
    assert last.logprobs == [-float(token) for token in want[at - 1 : at + 1]]
    assert outcome.scheduler.stats().generated_tokens == at + 1


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("most", range(1, 9))
def test_an_answer_has_at_most_max_tokens(overlap: bool, most: int) -> None:
    engine = with_counts(FakeEngine(CAPACITY), lambda: MOST)
    outcome = run(
        {0: [generate("r", PROMPT, most)]}, engine=engine, capacity=CAPACITY, overlap=overlap
    )
    assert outcome.channel.tokens("r") == continuation(PROMPT, most)
    assert outcome.channel.reason("r") == "length"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("given", "surplus"), [(1, 0), (MOST, 1)])
def test_each_step_has_a_request_near_its_max_tokens(
    overlap: bool, given: int, surplus: int
) -> None:
    """A step is launched before the host knows whether the drafts in flight end the answer."""
    engine = FaultyEngine(CAPACITY)
    with_counts(engine, lambda: given)
    most = 1 + 4 * MOST
    request = generate("r", PROMPT, most)
    outcome = run({0: [request]}, engine=engine, capacity=CAPACITY, overlap=overlap)
    assert outcome.channel.tokens("r") == continuation(PROMPT, most)
    turns = outcome.channel.turns("r")
    assert turns == list(range(turns[0], turns[0] + len(turns)))
    decodes = sum(bool(plan.decode_slots) for plan in engine.plans)
    assert decodes == (most - 1) // given + surplus * overlap
    assert outcome.scheduler.stats().draft_steps == (most - 1) // given


def test_rows_have_pages_for_all_tokens_in_flight() -> None:
    """Each step may give three tokens and gives one. A bound is the number of known tokens plus the most of two steps."""
    engine = FaultyEngine(CAPACITY)
    with_counts(engine, lambda: 1)
    run({0: [generate("r", PROMPT, 20)]}, engine=engine, capacity=CAPACITY)
    bounds = [plan.decode_bounds[0] for plan in engine.plans if plan.decode_bounds]
    # The second decode step is planned when the prompt's token is known, and the first one is in flight
    assert bounds[:4] == [8, 11, 12, 13]
    assert max(bounds) == len(PROMPT) + 20 - 1


def test_steps_without_a_token_send_nothing() -> None:
    counts = iter([0, 0, 2, 0, 1] * 20)
    engine = with_counts(FakeEngine(CAPACITY), lambda: next(counts))
    outcome = run({0: [generate("r", PROMPT, 9)]}, engine=engine, capacity=CAPACITY)
    assert outcome.channel.tokens("r") == continuation(PROMPT, 9)
    assert 0 not in sizes(outcome, "r")


def test_a_failed_token_ends_the_answer_after_those_before_it() -> None:
    engine = FaultyEngine(CAPACITY, no_token={(2, 0)})
    with_counts(engine, lambda: MOST)
    request = generate("r", PROMPT, 20, logprobs=True)
    outcome = run({0: [request]}, engine=engine, capacity=CAPACITY)
    assert outcome.channel.tokens("r") == continuation(PROMPT, 6)
    assert outcome.channel.reason("r") == "error"
    last = outcome.channel.deltas()["r"][-1]
    assert last.logprobs is not None
    assert len(last.logprobs.logprobs) == len(last.token_ids) == 2
    assert_nothing_is_allocated(outcome)
