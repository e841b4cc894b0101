"""Priorities: higher ones first, with preemption of lower ones."""

from __future__ import annotations

import pytest

from mla_router.worker.config import WorkerConfig
from mla_router.worker.messages import Abort, ToScheduler
from mla_router.worker.step.engine import Capacity
from support.fake_engine import FakeEngine, continuation
from support.scripted_scheduler import Run, assert_nothing_is_allocated, generate, run
from support.stepped_scheduler import SteppedScheduler

ONE_SLOT = Capacity(num_pages=64, page_size=4, num_slots=1, context_length=64)
SMALL = Capacity(num_pages=12, page_size=4, num_slots=4, context_length=48)


def ends(outcome: Run) -> list[str]:
    return [delta.rid for delta in outcome.channel.all_deltas() if delta.finish_reason]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("capacity", [ONE_SLOT, SMALL], ids=["slot", "memory"])
def test_a_higher_priority_preempts_a_lower_one(capacity: Capacity, overlap: bool) -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate("low", [1, 2, 3], 40), generate("lower", [4, 5, 6], 40, priority=-1)],
        10: [generate("high", [7, 8, 9], 30, priority=5)],
        12: [generate("highest", [10, 11, 12], 30, priority=6)],
    }
    outcome = run(script, capacity=capacity, overlap=overlap, enable_priority_scheduling=True)
    assert ends(outcome) == ["highest", "high", "low", "lower"]
    assert outcome.scheduler.stats().retracted > 0
    for rid, prompt, count in (
        ("low", [1, 2, 3], 40),
        ("lower", [4, 5, 6], 40),
        ("high", [7, 8, 9], 30),
        ("highest", [10, 11, 12], 30),
    ):
        assert outcome.channel.tokens(rid) == continuation(prompt, count)
    assert_nothing_is_allocated(outcome)


def test_equal_priorities_do_not_preempt() -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", [1], 30, priority=2)],
        5: [generate("b", [2], 5, priority=2), generate("c", [3], 5, priority=1)],
    }
    outcome = run(script, capacity=ONE_SLOT, enable_priority_scheduling=True)
    assert ends(outcome) == ["a", "b", "c"]
    assert outcome.scheduler.stats().retracted == 0


def test_nothing_is_preempted_when_there_is_room() -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", [1], 30)],
        5: [generate("b", [2], 5, priority=9)],
    }
    outcome = run(script, enable_priority_scheduling=True)
    assert outcome.scheduler.stats().retracted == 0


def test_a_preempted_request_can_be_aborted() -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate("low", [1], 30)],
        5: [generate("high", [2], 10, priority=1)],
        9: [Abort("low")],
    }
    outcome = run(script, capacity=ONE_SLOT, enable_priority_scheduling=True)
    assert outcome.channel.reason("low") == "abort"
    assert outcome.channel.tokens("high") == continuation([2], 10)
    assert_nothing_is_allocated(outcome)


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_preemption_is_for_the_next_candidate(policy: str) -> None:
    """Under lpm the next candidate is not the oldest request, but the one with a cached prompt. It needs all memory."""
    cached = list(range(40))
    script: dict[int, list[ToScheduler]] = {
        0: [generate("warm", cached, 1)],
        10: [generate("low", [45, 46, 47], 100)],
        14: [
            generate("small", [1, 2, 3, 4, 5], 8, priority=5),
            generate("large", [*cached, 41], 110, priority=5),
        ],
    }
    capacity = Capacity(num_pages=40, page_size=4, num_slots=4, context_length=160)
    outcome = run(
        script,
        capacity=capacity,
        enable_priority_scheduling=True,
        schedule_policy=policy,
        schedule_conservativeness=1.5,
    )
    assert ends(outcome)[-1] == "low"
    first = "large" if policy == "lpm" else "small"
    assert outcome.channel.turns(first)[0] <= 14 + 4


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_no_preemption_for_a_request_that_waits_for_a_shared_prompt(policy: str) -> None:
    shared = [i % 47 for i in range(200)]
    script: dict[int, list[ToScheduler]] = {
        0: [generate("low", [45, 46, 47], 150)],
        5: [generate("first", [*shared, 1], 20, priority=5)],
        8: [generate("second", [*shared, 2], 20, priority=5)],
    }
    outcome = run(
        script,
        capacity=Capacity(num_pages=100, page_size=4, num_slots=8, context_length=400),
        chunk_size=4,
        max_prefill_tokens=8,
        enable_priority_scheduling=True,
        schedule_policy=policy,
        schedule_conservativeness=1.5,
    )
    assert ends(outcome) == ["first", "second", "low"]
    assert outcome.scheduler.stats().retracted == 1


def test_no_preemption_that_would_not_suffice() -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate("old", [45, 46, 47], 100, priority=5)],
        3: [generate(f"low{i}", [i, 9, 9], 12) for i in range(3)],
        8: [generate("high", [1] * 60, 70, priority=5)],  # it fits after the end of `old`
    }
    outcome = run(
        script,
        capacity=Capacity(num_pages=40, page_size=4, num_slots=6, context_length=160),
        enable_priority_scheduling=True,
        schedule_conservativeness=1.5,
    )
    assert outcome.scheduler.stats().retracted == 0
    assert ends(outcome) == ["low0", "low1", "low2", "old", "high"]


def test_without_the_flag_all_are_equal() -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", [1], 20)],
        5: [generate("b", [2], 5), generate("c", [3], 5, priority=9)],
    }
    outcome = run(script, capacity=ONE_SLOT)
    assert ends(outcome) == ["a", "b", "c"]


def test_the_step_of_a_preemption_admits_nobody() -> None:
    config = WorkerConfig(enable_priority_scheduling=True)
    stepped = SteppedScheduler(FakeEngine(ONE_SLOT), config, overlap=False)
    running = stepped.scheduler.planner.running
    stepped.turn(generate("low", [1, 2, 3], 20))
    stepped.turn(generate("high", [4, 5, 6], 20, priority=1))
    assert list(running) == []
    stepped.turn()
    assert list(running) == ["high"]
    stepped.stop()
