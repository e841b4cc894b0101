"""A failed step ends its own requests and no others. A lost device ends the process."""

from __future__ import annotations

import pytest

from mla_router.worker.messages import ToScheduler
from mla_router.worker.scheduler.scheduler import MAX_FAILURES, EngineFailed
from mla_router.worker.step.engine import Capacity
from support.fake_engine import continuation
from support.faulty_engine import FaultyEngine
from support.scripted_scheduler import assert_nothing_is_allocated, generate, run

CAPACITY = Capacity(num_pages=64, page_size=4, num_slots=2, context_length=64)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("phase", ["fail_forward", "fail_sample", "fail_wait"])
def test_a_failed_step_ends_its_requests_alone(phase: str, at: int, overlap: bool) -> None:
    engine = FaultyEngine(CAPACITY, **{phase: {at}})
    script: dict[int, list[ToScheduler]] = {
        # The third request waits for one of the two slots, so it is not in the first steps.
        0: [generate(rid, [i, 5, 6], 7) for i, rid in enumerate("abc")],
        40: [generate("later", [0, 5, 6], 7)],
    }
    outcome = run(script, engine=engine, capacity=CAPACITY, overlap=overlap)
    for i, rid in enumerate("ab"):
        assert outcome.channel.reason(rid) == "error"
        assert "step" in outcome.channel.deltas()[rid][-1].error
        tokens = outcome.channel.tokens(rid)
        assert len(tokens) <= at
        assert tokens == continuation([i, 5, 6], 7)[: len(tokens)]
    assert outcome.channel.tokens("c") == continuation([2, 5, 6], 7)
    assert outcome.channel.tokens("later") == continuation([0, 5, 6], 7)
    assert_nothing_is_allocated(outcome)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("phase", ["fail_forward", "fail_sample", "fail_wait"])
def test_failures_in_a_row_end_the_process(phase: str, overlap: bool) -> None:
    engine = FaultyEngine(CAPACITY, **{phase: range(100)})
    script: dict[int, list[ToScheduler]] = {0: [generate(f"r{i}", [i], 3) for i in range(20)]}
    with pytest.raises(EngineFailed, match=f"{MAX_FAILURES} steps"):
        run(script, engine=engine, capacity=CAPACITY, overlap=overlap)
    # The requests of the last failure get no error: they end with the process, and another worker may take them.
    assert MAX_FAILURES <= len(engine.plans) <= MAX_FAILURES + 1


def test_failures_far_apart_do_not_add_up() -> None:
    engine = FaultyEngine(CAPACITY, fail_forward=range(0, 100, 5))
    script: dict[int, list[ToScheduler]] = {
        i: [generate(f"r{i}", [i % 50, 7], 3)] for i in range(0, 200, 10)
    }
    outcome = run(script, engine=engine, capacity=CAPACITY)
    reasons = [outcome.channel.reason(f"r{i}") for i in range(0, 200, 10)]
    assert reasons.count("error") > MAX_FAILURES
    assert reasons.count("length") > MAX_FAILURES
    assert_nothing_is_allocated(outcome)


def test_a_lost_device_ends_the_process_at_once() -> None:
    engine = FaultyEngine(CAPACITY, fail_wait={2}, usable=False)
    with pytest.raises(EngineFailed, match="no later step"):
        run({0: [generate("a", [1], 9)]}, engine=engine, capacity=CAPACITY)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at", range(4))
def test_a_row_without_a_token_ends_its_request_alone(at: int, overlap: bool) -> None:
    engine = FaultyEngine(CAPACITY, no_token={(at, 1)})
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    outcome = run(
        {0: [generate(f"r{i}", prompt, 6) for i, prompt in enumerate(prompts)]},
        engine=engine,
        capacity=CAPACITY,
        overlap=overlap,
    )
    assert outcome.channel.tokens("r0") == continuation(prompts[0], 6)
    assert outcome.channel.reason("r1") == "error"
    assert outcome.channel.tokens("r1") == continuation(prompts[1], 6)[:at]
    assert_nothing_is_allocated(outcome)


@pytest.mark.parametrize("chunks", [1, 3])
def test_results_of_a_failed_request_are_not_cached(chunks: int) -> None:
    """Chunks that were cached before the last chunk failed are removed as well."""
    engine = FaultyEngine(CAPACITY, no_token={(chunks - 1, 0)})
    prompt = list(range(20))
    outcome = run(
        {0: [generate("a", prompt)], 50: [generate("b", prompt)]},
        engine=engine,
        capacity=CAPACITY,
        chunk_size=-(-len(prompt) // chunks),
    )
    assert outcome.channel.reason("a") == "error"
    assert outcome.channel.deltas()["b"][0].cached_tokens == 0
    assert outcome.channel.tokens("b") == continuation(prompt, 4)


def test_a_shared_prefix_stays_when_one_reader_fails() -> None:
    prompt = list(range(20))
    script = {
        0: [generate("warm", prompt, 1)],
        5: [generate("reads", [*prompt, 30], 12), generate("breaks", [*prompt, 31], 12)],
        40: [generate("late", [*prompt, 32], 1)],
    }
    engine = FaultyEngine(CAPACITY, no_token={(4, 1)})
    outcome = run(script, engine=engine, capacity=CAPACITY)
    assert outcome.channel.reason("breaks") == "error"
    assert outcome.channel.tokens("reads") == continuation([*prompt, 30], 12)
    assert outcome.channel.deltas()["late"][0].cached_tokens == len(prompt)
