"""Exhausted memory: requests are retracted, and their output does not change."""

from __future__ import annotations

import pytest

from mla_router.worker.messages import Abort, Deltas, ToScheduler
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.scheduler.retraction import all_but_strongest, cheapest
from mla_router.worker.step.engine import Capacity
from support.fake_engine import continuation, logprob
from support.scripted_scheduler import assert_nothing_is_allocated, generate, run

# 80 tokens; the requests below need 6 * 58.
TINY = Capacity(num_pages=20, page_size=4, num_slots=6, context_length=64)
PROMPTS = [[i, *range(1, 18)] for i in range(6)]
OPTIMIST = 0.01


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk_size", [3, 64])
@pytest.mark.parametrize("use_prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_each_request_gets_all_tokens_once(
    overlap: bool, chunk_size: int, use_prefix_cache: bool, page_size: int
) -> None:
    outcome = run(
        {0: [generate(f"r{i}", prompt, 40, seed=i) for i, prompt in enumerate(PROMPTS)]},
        overlap=overlap,
        chunk_size=chunk_size,
        use_prefix_cache=use_prefix_cache,
        capacity=Capacity(80 // page_size, page_size, 6, 64),
        schedule_conservativeness=OPTIMIST,
    )
    for i, prompt in enumerate(PROMPTS):
        assert outcome.channel.tokens(f"r{i}") == continuation(prompt, 40, seed=i)
        assert outcome.channel.reason(f"r{i}") == "length"
        first, *others = outcome.channel.deltas()[f"r{i}"]
        assert first.cached_tokens < len(prompt)
        # The pages that a retracted request finds cached do not matter.
        assert all(delta.cached_tokens == 0 for delta in others)
    stats = outcome.scheduler.stats()
    assert stats.retracted > 0
    assert stats.prompt_tokens == sum(len(prompt) for prompt in PROMPTS)
    assert_nothing_is_allocated(outcome)


def test_the_oldest_request_is_never_delayed() -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate(f"r{i}", prompt, 40) for i, prompt in enumerate(PROMPTS)]
    }
    outcome = run(script, capacity=TINY, schedule_conservativeness=OPTIMIST)
    assert outcome.scheduler.stats().retracted > 0
    messages = [said.items for said in outcome.channel.said if isinstance(said, Deltas)]
    # It gets a token in every step from its first to its last.
    assert [delta.rid for items in messages[:40] for delta in items].count("r0") == 40


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stop_token_ends_a_request_that_was_just_retracted(overlap: bool) -> None:
    retracted = 0
    for shift in range(25):
        script: dict[int, list[ToScheduler]] = {0: []}
        wanted = {}
        for i, prompt in enumerate(PROMPTS):
            tokens = continuation(prompt, 40, seed=shift)
            stop = tokens[(7 * i + shift) % 25]
            wanted[f"r{i}"] = tokens[: tokens.index(stop) + 1]
            script[0].append(generate(f"r{i}", prompt, 40, seed=shift, stop_token_ids=[stop]))
        outcome = run(script, overlap=overlap, capacity=TINY, schedule_conservativeness=OPTIMIST)
        assert {rid: outcome.channel.tokens(rid) for rid in wanted} == wanted
        assert_nothing_is_allocated(outcome)
        retracted += outcome.scheduler.stats().retracted
    assert retracted > 25


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("when", range(1, 60, 3))
def test_a_retracted_request_can_be_aborted(when: int, overlap: bool) -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate(f"r{i}", prompt, 40) for i, prompt in enumerate(PROMPTS)],
        when: [Abort(f"r{i}") for i in range(1, 6)],
    }
    outcome = run(script, overlap=overlap, capacity=TINY, schedule_conservativeness=OPTIMIST)
    assert outcome.channel.tokens("r0") == continuation(PROMPTS[0], 40)
    for i in range(1, 6):
        assert outcome.channel.reason(f"r{i}") in ("abort", "length")
    assert_nothing_is_allocated(outcome)


@pytest.mark.parametrize("overlap", [True, False])
def test_prompt_logprobs_survive_a_retraction(overlap: bool) -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [
            generate(f"r{i}", prompt, 40, prompt_logprobs_from=2 * i)
            for i, prompt in enumerate(PROMPTS)
        ]
    }
    outcome = run(
        script, overlap=overlap, chunk_size=5, capacity=TINY, schedule_conservativeness=OPTIMIST
    )
    assert outcome.scheduler.stats().retracted > 0
    for i, prompt in enumerate(PROMPTS):
        logprobs = outcome.channel.deltas()[f"r{i}"][0].prompt_logprobs
        assert logprobs is not None
        wanted = range(max(1, 2 * i), len(prompt))
        assert logprobs.logprobs == [logprob(prompt[:k], prompt[k]) for k in wanted]
        assert outcome.channel.tokens(f"r{i}") == continuation(prompt, 40)


def running(arrival: int, priority: int, computed: int, launched: int = 1) -> Request:
    request = Request(generate(f"r{arrival}", [1, 2], 9), arrival=arrival, priority=priority)
    request.move_to(State.PREFILL)
    request.move_to(State.DECODE)
    request.computed_length = computed
    request.launched_outputs = request.least_outputs = launched
    return request


def test_the_cheapest_request_is_retracted() -> None:
    oldest, big, small = running(0, 0, 5), running(1, 0, 90), running(2, 0, 30)
    assert cheapest(all_but_strongest([small, big, oldest])) is small
    assert cheapest(all_but_strongest([oldest, big])) is big
    old, young = running(5, 0, 30), running(6, 0, 30)
    assert cheapest([old, young]) is cheapest([young, old]) is young
    lower = running(3, -1, 95)
    assert cheapest(all_but_strongest([lower, small, oldest])) is lower
    higher = running(9, 1, 1)
    assert cheapest(all_but_strongest([higher, oldest, big])) is oldest
    ending = running(4, 0, 80, launched=9)  # only its last token is missing
    begun = running(8, 0, 1)
    assert cheapest(all_but_strongest([oldest, small, ending, begun])) is ending


def test_a_request_retracted_after_a_jump_computes_its_prompt_like_any_other() -> None:
    """Requests after a jump go before others in each step, because they were decoding."""
    jumper = running(0, 0, 2)
    jumper.jump([3, 4, 5])
    assert jumper.is_jumping
    jumper.retract()
    assert not jumper.is_jumping
