"""The step loop, with an engine whose tokens depend on every KV cache location that it reads."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.messages import Abort, FlushCache, GetStats, Stats, ToScheduler
from mla_router.worker.scheduler import scheduler
from mla_router.worker.step.engine import Capacity
from support.examples import examples
from support.fake_engine import VOCAB, continuation
from support.scripted_scheduler import assert_nothing_is_allocated, generate, run
from support.timed_engine import TimedEngine


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 5, 64])
def test_a_request_gets_its_tokens(overlap: bool, chunk_size: int) -> None:
    prompt = list(range(1, 30))
    outcome = run({0: [generate("a", prompt, 7)]}, overlap=overlap, chunk_size=chunk_size)
    assert outcome.channel.tokens("a") == continuation(prompt, 7)
    assert outcome.channel.reason("a") == "length"
    assert_nothing_is_allocated(outcome)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_finish_by_length_costs_no_step_too_many(overlap: bool) -> None:
    outcome = run({0: [generate("a", [1, 2, 3], 6)]}, overlap=overlap)
    assert outcome.scheduler.stats().steps == 6


@pytest.mark.parametrize(("overlap", "steps"), [(True, 1), (False, 0)])
def test_a_stop_token_costs_one_step_too_many_under_overlap(overlap: bool, steps: int) -> None:
    prompt = [4, 4, 2]
    expected = continuation(prompt, 20)
    stop = next(token for i, token in enumerate(expected) if token not in expected[:i] and i >= 3)
    outcome = run({0: [generate("a", prompt, 20, stop_token_ids=[stop])]}, overlap=overlap)
    assert outcome.channel.tokens("a") == expected[: expected.index(stop) + 1]
    assert outcome.channel.reason("a") == "stop"
    assert outcome.scheduler.stats().steps == expected.index(stop) + 1 + steps
    assert_nothing_is_allocated(outcome)


def test_prefill_chunks_run_beside_decode_rows() -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", [1, 2, 3], 30)],
        4: [generate("b", list(range(40)), 3)],
    }
    outcome = run(script, chunk_size=8)
    assert outcome.channel.tokens("a") == continuation([1, 2, 3], 30)
    assert outcome.channel.tokens("b") == continuation(list(range(40)), 3)
    assert outcome.scheduler.stats().steps == 30  # the five chunks of `b` took no additional steps


def test_a_warm_prefix_is_not_computed_again() -> None:
    prefix = list(range(24))
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", [*prefix, 7], 4)],
        50: [generate("b", [*prefix, 9, 9], 4)],
    }
    outcome = run(script)
    assert outcome.channel.deltas()["a"][0].cached_tokens == 0
    assert outcome.channel.deltas()["b"][0].cached_tokens == 24
    assert outcome.channel.tokens("b") == continuation([*prefix, 9, 9], 4)


def test_the_answer_is_cached_too() -> None:
    prompt = list(range(10))
    answer = continuation(prompt, 10)
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", prompt, 10)],
        50: [generate("b", [*prompt, *answer, 1, 2], 4)],
    }
    outcome = run(script)
    # 19 tokens were computed (the last one of the answer is never an input): four whole pages.
    assert outcome.channel.deltas()["b"][0].cached_tokens == 16
    assert outcome.channel.tokens("b") == continuation([*prompt, *answer, 1, 2], 4)


def test_an_exact_repeat_still_computes_its_last_token() -> None:
    prompt = list(range(16))
    outcome = run({0: [generate("a", prompt)], 50: [generate("b", prompt)]})
    assert outcome.channel.deltas()["b"][0].cached_tokens == 12
    assert outcome.channel.tokens("b") == outcome.channel.tokens("a")


def test_salts_do_not_share() -> None:
    prompt = list(range(24))
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", prompt, cache_salt="x")],
        50: [generate("b", prompt, cache_salt="y")],
    }
    outcome = run(script)
    assert outcome.channel.deltas()["b"][0].cached_tokens == 0


def test_the_second_of_two_equal_prefixes_waits_for_the_first() -> None:
    prefix = [i % VOCAB for i in range(64)]
    requests = [generate(f"r{i}", [*prefix, i], 4) for i in range(4)]
    for chunk_size in (16, 64, 256):
        outcome = run({0: list(requests)}, chunk_size=chunk_size)
        cached = [outcome.channel.deltas()[f"r{i}"][0].cached_tokens for i in range(4)]
        assert cached[0] == 0
        assert min(cached[1:]) > 64 - 32  # no request waits for fewer than 32 common tokens
        if chunk_size > 16:
            assert cached == [0, 64, 64, 64]
        for i in range(4):
            assert outcome.channel.tokens(f"r{i}") == continuation([*prefix, i], 4)


def test_without_prefix_cache_nothing_is_kept() -> None:
    prompt = list(range(24))
    script: dict[int, list[ToScheduler]] = {0: [generate("a", prompt)], 50: [generate("b", prompt)]}
    outcome = run(script, use_prefix_cache=False)
    assert outcome.channel.deltas()["b"][0].cached_tokens == 0
    assert outcome.scheduler.stats().free_pages == outcome.scheduler.stats().total_pages


def test_more_requests_than_memory_are_served_in_turn() -> None:
    capacity = Capacity(num_pages=10, page_size=4, num_slots=8, context_length=40)
    script: dict[int, list[ToScheduler]] = {0: [generate(f"r{i}", [i] * 15, 18) for i in range(12)]}
    outcome = run(script, capacity=capacity)
    for i in range(12):
        assert outcome.channel.tokens(f"r{i}") == continuation([i] * 15, 18)
    assert_nothing_is_allocated(outcome)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (generate("bad", []), "token ids"),
        (generate("bad", [VOCAB]), "token ids"),
        (generate("bad", [-1]), "token ids"),
        (generate("bad", [1], 0), "can never fit"),
        (generate("bad", [1] * 100, 100), "can never fit"),
    ],
)
def test_a_request_that_would_break_a_step_is_refused(message: ToScheduler, named: str) -> None:
    outcome = run({0: [generate("good", [1, 2], 5), message]})
    assert outcome.channel.reason("bad") == "error"
    assert named in outcome.channel.deltas()["bad"][0].error
    assert outcome.channel.tokens("good") == continuation([1, 2], 5)


def test_stats_and_flush_are_answered() -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", list(range(20)))],
        50: [GetStats(7)],
        51: [FlushCache(8)],
    }
    answers = [m for m in run(script).channel.said if isinstance(m, Stats) and m.query]
    assert [answer.query for answer in answers] == [7, 8]
    assert answers[0].cached_pages > 0
    assert answers[1].free_pages == answers[1].total_pages


def test_stats_are_sent_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is an eighth of a second later."""
    clock = itertools.count(1.0, 0.125)
    times = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=lambda: 0.0)
    monkeypatch.setattr(scheduler, "time", times)
    sent = [m for m in run({0: [generate("a", [1, 2], 30)]}).channel.said if isinstance(m, Stats)]
    readings = (next(clock) - 1.0) / 0.125
    assert readings > 30
    assert len(sent) == -(-readings // 4)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("when", range(12))
def test_abort_is_legal_in_every_state(when: int, overlap: bool) -> None:
    capacity = Capacity(num_pages=16, page_size=4, num_slots=2, context_length=64)
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", list(range(30)), 6), generate("b", [1, 2], 5), generate("c", [3], 20)],
        when + 1: [Abort("a"), Abort("nobody")],
    }
    outcome = run(script, overlap=overlap, capacity=capacity, chunk_size=7)
    assert outcome.channel.reason("a") in ("abort", "length")
    assert continuation(list(range(30)), 6)[: len(outcome.channel.tokens("a"))] == (
        outcome.channel.tokens("a")
    )
    assert outcome.channel.tokens("b") == continuation([1, 2], 5)
    assert outcome.channel.tokens("c") == continuation([3], 20)
    assert_nothing_is_allocated(outcome)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("heard", [1, 2, 9])
def test_no_step_is_computed_after_an_abort(heard: int, overlap: bool) -> None:
    """One step follows each receive, and none follows the receive with the abort."""
    script: dict[int, list[ToScheduler]] = {0: [generate("a", [1, 2], 50)], heard: [Abort("a")]}
    outcome = run(script, overlap=overlap)
    assert outcome.channel.reason("a") == "abort"
    assert outcome.scheduler.stats().steps == heard
    assert_nothing_is_allocated(outcome)


# -- both loops give the same tokens ----------------------------------------------------------------

_requests = st.lists(
    st.tuples(
        st.integers(0, 60),  # arrives at this receive
        st.integers(0, 3),  # which of four shared prefixes
        st.integers(0, 40),  # how much of it
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
        st.integers(1, 20),  # max_tokens
        st.sampled_from([(), (3, 7), (11, 12, 13, 14, 15)]),  # stop tokens
        st.none() | st.integers(0, 40),  # aborted so many receives later
        st.integers(0, 2),  # seed
    ),
    min_size=1,
    max_size=30,
)


@examples(100, deadline=None)
@given(
    requests=_requests, chunk_size=st.sampled_from([1, 7, 64]), page_size=st.sampled_from([1, 4])
)
def test_overlap_and_normal_give_identical_tokens(
    requests, chunk_size: int, page_size: int
) -> None:
    capacity = Capacity(
        num_pages=160 // page_size, page_size=page_size, num_slots=5, context_length=80
    )
    prefixes = [[(i * k + k) % VOCAB for i in range(40)] for k in (1, 3, 5, 7)]
    script: dict[int, list[ToScheduler]] = {}
    expected, aborted = {}, set()
    for n, (arrives, which, share, tail, max_tokens, stops, abort, seed) in enumerate(requests):
        rid, prompt = f"r{n}", [*prefixes[which][:share], *tail]
        message = generate(rid, prompt, max_tokens, stop_token_ids=list(stops), seed=seed)
        script.setdefault(arrives, []).append(message)
        if abort is not None:
            script.setdefault(arrives + abort, []).append(Abort(rid))
            aborted.add(rid)
        expected[rid] = continuation(prompt, max_tokens, seed, stops)
    for overlap in (True, False):
        outcome = run(script, overlap=overlap, capacity=capacity, chunk_size=chunk_size)
        for rid, tokens in expected.items():
            got = outcome.channel.tokens(rid)
            if rid in aborted and outcome.channel.reason(rid) == "abort":
                assert got == tokens[: len(got)]
            else:
                assert got == tokens
        assert_nothing_is_allocated(outcome)


def test_the_first_delta_alone_has_the_cached_tokens() -> None:
    outcome = run({0: [generate("a", list(range(20)))], 9: [generate("b", list(range(20)))]})
    deltas = outcome.channel.deltas()["b"]
    assert [delta.cached_tokens for delta in deltas] == [16, 0, 0, 0]
    assert [delta.queue_seconds > 0 for delta in deltas] == [True, False, False, False]


def test_stats_have_the_seconds_of_all_steps_and_those_of_waiting() -> None:
    capacity = Capacity(num_pages=64, page_size=4, num_slots=4, context_length=64)
    engine = TimedEngine(capacity)
    outcome = run({0: [generate("a", [1, 2, 3], 5)]}, engine=engine, capacity=capacity)
    stats = outcome.scheduler.stats()
    assert stats.step_seconds == pytest.approx(sum(seconds for _, seconds in engine.steps))
    assert stats.step_seconds > 0 and stats.wait_seconds > 0
    unmeasured = run({0: [generate("a", [1, 2, 3], 5)]})
    assert unmeasured.scheduler.stats().step_seconds == 0.0
