"""The number of prompt tokens in a step, and their requests."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise

import pytest

from mla_router.worker.messages import ToScheduler
from mla_router.worker.scheduler.estimate import OutputEstimate
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import StepPlan
from support.fake_engine import continuation
from support.faulty_engine import FaultyEngine
from support.scripted_scheduler import generate, run

CAPACITY = Capacity(num_pages=128, page_size=4, num_slots=8, context_length=128)


def plans(script: dict[int, list[ToScheduler]], **how: int | bool) -> list[StepPlan]:
    """Runs the script, checks the tokens of all requests, and returns the plans of the steps."""
    engine = FaultyEngine(CAPACITY)  # it keeps its plans
    asked = [message for messages in script.values() for message in messages]
    outcome = run(script, engine=engine, capacity=CAPACITY, **how)
    for message in asked:
        expected = continuation(message.prompt, message.sampling.max_tokens)
        assert outcome.channel.tokens(message.rid) == expected
    return engine.plans


def chunks(plan: StepPlan) -> list[int]:
    return [len(chunk.tokens) for chunk in plan.chunks]


def test_a_step_has_a_limit_of_prompt_tokens_and_a_request_of_its_chunk() -> None:
    script: dict[int, list[ToScheduler]] = {0: [generate(f"r{i}", [i] * 30, 2) for i in range(3)]}
    got = plans(script, chunk_size=12, max_prefill_tokens=20)
    assert [chunks(plan) for plan in got if plan.chunks] == [
        [12, 8],
        [12, 8],
        [6, 12, 2],
        [2, 12],
        [12],
        [4],
    ]


@pytest.mark.parametrize(("limit", "prompt_tokens"), [(20, 16), (8, 4), (5, 3)])
def test_decode_rows_take_up_to_half_of_a_step(limit: int, prompt_tokens: int) -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate(f"d{i}", [i], 30) for i in range(4)],
        3: [generate("p", [9] * 60, 1)],
    }
    got = plans(script, max_prefill_tokens=limit)
    beside = [plan for plan in got if plan.chunks and len(plan.decode_slots) == 4]
    assert [chunks(plan) for plan in beside][:2] == [[prompt_tokens], [prompt_tokens]]


def test_the_oldest_prompt_gets_its_budget_first() -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", [1] * 40, 1)],
        2: [generate("b", [2] * 40, 1)],
    }
    got = plans(script, chunk_size=10, max_prefill_tokens=15)
    assert [chunks(plan) for plan in got][:5] == [[10], [10], [10, 5], [10, 5], [10]]


@pytest.mark.parametrize("mixed", [True, False])
def test_steps_of_one_kind_take_turns(mixed: bool) -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", [1, 2, 3], 30)],
        4: [generate(f"b{i}", [i] * 40, 3) for i in range(4)],
    }
    got = plans(script, chunk_size=8, disable_mixed_chunk=not mixed)
    kinds = [(bool(plan.chunks), bool(plan.decode_slots)) for plan in got]
    assert ((True, True) in kinds) == mixed
    if not mixed:
        # A decoding request waits for at most one step with prompts.
        first = kinds.index((False, True))
        assert ((True, False), (True, False)) not in pairwise(kinds[first:])


def test_a_blocked_request_is_admitted_when_the_expected_length_has_fallen() -> None:
    """No request arrives or ends meanwhile: the expected length falls in every step."""
    capacity = Capacity(num_pages=312, page_size=4, num_slots=8, context_length=2000)
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", list(range(1, 50)) * 2, 1000), generate("b", [7] * 125, 1000)]
    }
    outcome = run(script, capacity=capacity, chunk_size=8192)
    ratios = OutputEstimate(1.0)
    for turn in itertools.count():
        # `a` gets one token in each turn, `b` none
        both = sum(
            math.ceil((length + math.ceil(left * ratios.ratio)) / 4)
            for length, left in ((98 + turn, 1000 - turn), (125, 1000))
        )
        if both <= 312:
            break
        ratios.step()
    assert abs(outcome.channel.turns("b")[0] - turn) < 5
