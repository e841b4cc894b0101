"""The number of prompt tokens of a step, from the measured time of steps."""

from __future__ import annotations

import pytest

from mla_router.worker.core import Capacity, PrefillChunk, StepPlan
from mla_router.worker.engine.first_steps import first_steps
from mla_router.worker.scheduler.step_time import TARGET_S, StepTimeModel, TokenBudget
from support.fake_engine import VOCAB
from support.timed_engine import TimedEngine

CAPACITY = Capacity(num_pages=4096, page_size=16, num_slots=8, context_length=65536)


def measured(engine: TimedEngine) -> StepTimeModel:
    step_time = StepTimeModel()
    step_time.calibrate(first_steps(engine, vocab_size=VOCAB, largest=8192))
    return step_time


def next_chunk(step_time: StepTimeModel, start: int) -> StepPlan:
    """Returns a step with one chunk that takes the whole budget."""
    budget = TokenBudget(step_time, 8192, step_time.allowed(beside_decodes=False))
    tokens = budget.take(start, 60_000, begins=True, at_least=1)
    return StepPlan((), (), (PrefillChunk(0, start, (0,) * tokens, is_last=False),), (), ())


def step(step_time: StepTimeModel, engine: TimedEngine, start: int) -> float:
    """Plans a step and corrects the model by its seconds, which it returns."""
    plan = next_chunk(step_time, start)
    seconds = engine.seconds(plan)
    step_time.learn(plan, seconds)
    return seconds


@pytest.mark.parametrize("start", [0, 1000, 4000])
@pytest.mark.parametrize("speed", [0.3, 1, 10])
def test_a_step_takes_about_the_target(start: int, speed: float) -> None:
    engine = TimedEngine(CAPACITY)
    engine.slowdown = 1 / speed
    seconds = step(measured(engine), engine, start)
    assert TARGET_S / 3 < seconds < 0.5


def test_on_a_fast_device_nothing_is_cut() -> None:
    engine = TimedEngine(CAPACITY, token_s=1e-5, context_s=1e-11, prefix_s=1e-9)
    assert len(next_chunk(measured(engine), 0).chunks[0].tokens) == 8192
    assert len(next_chunk(measured(engine), 40_000).chunks[0].tokens) == 8192


def test_without_a_measurement_nothing_is_cut() -> None:
    assert len(next_chunk(StepTimeModel(), 40_000).chunks[0].tokens) == 8192


def test_the_time_of_a_step_is_predicted() -> None:
    engine = TimedEngine(CAPACITY)
    step_time = measured(engine)
    plan = next_chunk(step_time, 0)
    assert step_time.step_s(plan) == pytest.approx(engine.seconds(plan), rel=0.2)
    assert StepTimeModel().step_s(plan) == 0.0, "not measured"


def test_a_device_that_becomes_slower_has_shorter_chunks() -> None:
    engine = TimedEngine(CAPACITY)
    step_time = measured(engine)
    engine.slowdown = 20.0
    seconds = [step(step_time, engine, 0) for _ in range(12)]
    assert seconds[0] > 5.0
    assert seconds[-1] < 0.5
    engine.slowdown = 1.0
    seconds = [step(step_time, engine, 0) for _ in range(40)]
    assert seconds[-1] > TARGET_S / 2


@pytest.mark.parametrize("slowdown", [1.0, 3.0])
def test_a_large_fixed_time_does_not_shorten_the_chunks_to_nothing(slowdown: float) -> None:
    """On a busy machine each of a step's operations may wait for a core, whatever the number of tokens."""
    engine = TimedEngine(CAPACITY)
    step_time = measured(engine)
    engine.step_s, engine.slowdown = 1.5 / slowdown, slowdown
    prompt, computed, seconds = 3600, 0, 0.0
    while computed < prompt:
        plan = next_chunk(step_time, computed)
        took = engine.seconds(plan)
        step_time.learn(plan, took)
        computed, seconds = computed + len(plan.chunks[0].tokens), seconds + took
    at_once = StepPlan((), (), (PrefillChunk(0, 0, (0,) * prompt, is_last=True),), (), ())
    assert seconds < 6 * engine.seconds(at_once)


def test_one_slow_step_has_a_bounded_effect() -> None:
    engine = TimedEngine(CAPACITY)
    step_time = measured(engine)
    before = len(next_chunk(step_time, 0).chunks[0].tokens)
    engine.slowdown = 100.0
    step(step_time, engine, 0)
    assert len(next_chunk(step_time, 0).chunks[0].tokens) > before / 3


def test_prompts_take_as_long_as_a_token_that_takes_longer_than_the_target() -> None:
    engine = TimedEngine(CAPACITY, step_s=2.0, token_s=0.02)
    tokens = len(next_chunk(measured(engine), 0).chunks[0].tokens)
    assert 50 < tokens < 150


def test_decode_rows_leave_prompts_half_of_the_target() -> None:
    engine = TimedEngine(CAPACITY)
    step_time = measured(engine)
    for _ in range(50):
        step_time.learn(StepPlan((0,), (10,), (), (), ()), 0.6)
    assert step_time.allowed(beside_decodes=True) == pytest.approx(TARGET_S / 2)
    assert step_time.allowed(beside_decodes=False) > 0.9 * TARGET_S
