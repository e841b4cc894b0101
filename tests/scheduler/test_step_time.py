"""The number of prompt tokens of a step, from the measured time of steps."""

from __future__ import annotations

import pytest

from mla_router.worker.engine.first_steps import first_steps
from mla_router.worker.scheduler.step_time import TARGET_S, StepTimeModel, TokenBudget
from mla_router.worker.step.engine import Capacity, StepSeconds
from mla_router.worker.step.plan import PrefillChunk, StepPlan
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
    for unmeasured in (plan, plan_of(decodes=1)):
        assert StepTimeModel().step_s(unmeasured) == 0.0


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


# Seconds of a step, of a prompt token, of a pair of a token and one before it, and of a token of a prefix
STEP_S, TOKEN_S, CONTEXT_S, PREFIX_S = 2.0**-7, 2.0**-9, 2.0**-20, 2.0**-15


def chunk_s(start: int, tokens: int) -> float:
    """Returns the seconds of a chunk by the formula at the top of `step_time.py`."""
    pairs = sum(start + i + 0.5 for i in range(tokens))
    return tokens * TOKEN_S + pairs * CONTEXT_S + start * PREFIX_S


def exact() -> StepTimeModel:
    step_time = StepTimeModel()
    step_time.calibrate(
        StepSeconds(
            single=STEP_S,
            tokens=64,
            chunk=STEP_S + chunk_s(0, 64),
            prefix=512,
            single_after_prefix=STEP_S + chunk_s(512, 0),
            chunk_after_prefix=STEP_S + chunk_s(512, 64),
        )
    )
    return step_time


def plan_of(*chunks: tuple[int, int], decodes: int = 0) -> StepPlan:
    """Returns a step with chunks, given as start and tokens, and decode rows."""
    made = tuple(PrefillChunk(0, start, (0,) * tokens, is_last=False) for start, tokens in chunks)
    return StepPlan((0,) * decodes, (10,) * decodes, made, (), ())


@pytest.mark.parametrize("start", [0, 256, 3000])
def test_the_constants_are_found_again_from_their_measured_sums(start: int) -> None:
    step_time = exact()
    assert step_time.begin_s(start) == start * PREFIX_S
    assert step_time.token_s == TOKEN_S
    assert step_time.context_s == CONTEXT_S
    assert step_time.begin_s(start) + step_time.seconds(start, 100) == chunk_s(start, 100)
    assert step_time.tokens_within(step_time.seconds(start, 100), start) == pytest.approx(100)
    step = plan_of((start, 100), (7, 20), decodes=1)
    assert step_time.step_s(step) == STEP_S + chunk_s(start, 100) + chunk_s(7, 20)


def test_no_tokens_fit_into_no_time() -> None:
    step_time = exact()
    assert step_time.tokens_within(0.0, 5) == 0.0
    assert step_time.tokens_within(-1.0, 5) == 0.0
    assert step_time.tokens_within(TOKEN_S / 8, 0) == pytest.approx(1 / 8, rel=1e-3)


def test_noise_makes_no_constant_negative() -> None:
    """A chunk that takes less than a single token counts a quarter of its time, as the fixed part is unknown."""
    step_time = StepTimeModel()
    step_time.calibrate(StepSeconds(0.5, 10, 0.4, 100, 0.25, 0.125))
    assert (step_time.token_s, step_time.context_s, step_time.begin_s(9)) == (0.01, 0.0, 0.0)
    step_time.calibrate(StepSeconds(0.5, 10, 0.0, 0, 0.75, 0.0))
    assert (step_time.token_s, step_time.context_s, step_time.begin_s(9)) == (0.0, 0.0, 9 * 0.25)


@pytest.mark.parametrize(
    ("measured_s", "scale"),
    [(1.5, 1.5**0.6), (1.9, 1.9**0.6), (50.0, 2**0.6), (0.75, 0.75**0.3), (0.01, 0.5**0.3)],
)
def test_one_step_corrects_the_scale_by_a_part_of_its_ratio(
    measured_s: float, scale: float
) -> None:
    """More for a slow step than for a fast one. `measured_s` is in predicted seconds."""
    step_time = exact()
    for decodes in (0, 1):
        before = step_time.token_s
        chunk = (64, 256)
        seconds = step_time.begin_s(64) + step_time.seconds(64, 256)
        step_time.learn(plan_of(chunk, decodes=decodes), STEP_S + measured_s * seconds)
        assert step_time.token_s / before == pytest.approx(scale)
    assert step_time.token_s / TOKEN_S == pytest.approx(step_time.context_s / CONTEXT_S)
    assert step_time.token_s / TOKEN_S == pytest.approx(step_time.begin_s(8) / 8 / PREFIX_S)


@pytest.mark.parametrize(
    ("predicted_s", "measured_s", "learns"),
    [(0.02, 0.04, False), (0.02, 0.06, True), (0.051, 0.04, True), (0.049, 0.049, False)],
)
def test_steps_under_an_eighth_of_the_target_correct_nothing(
    predicted_s: float, measured_s: float, learns: bool
) -> None:
    step_time = StepTimeModel()
    step_time.calibrate(StepSeconds(0.0, 10, 10 * predicted_s, 10, 0.0, 10 * predicted_s))
    step_time.learn(plan_of((0, 1)), measured_s)
    assert (step_time.token_s != pytest.approx(predicted_s)) == learns


@pytest.mark.parametrize(("measured_s", "scale"), [(0.9, 1.0), (1.2, 1.6**0.6)])
def test_steps_whose_rest_takes_longer_than_their_prompts_correct_nothing(
    measured_s: float, scale: float
) -> None:
    step_time = StepTimeModel()
    step_time.calibrate(StepSeconds(1.0, 10, 8.5, 10, 1.0, 8.5))
    step_time.learn(plan_of((0, 1)), 1.0 + measured_s)
    assert step_time.token_s == pytest.approx(0.75 * scale)


def test_the_time_of_decode_rows_is_smoothed() -> None:
    step_time = exact()
    step_time.learn(plan_of(decodes=1), STEP_S + 0.1)
    assert step_time.step_s(plan_of(decodes=1)) == pytest.approx(STEP_S + 0.03)
    assert step_time.step_s(plan_of((0, 1))) == pytest.approx(STEP_S + chunk_s(0, 1))
    assert step_time.allowed(beside_decodes=True) == pytest.approx(TARGET_S - STEP_S - 0.03)
    assert step_time.allowed(beside_decodes=False) == pytest.approx(TARGET_S - STEP_S)


def test_a_budget_is_taken_by_tokens_and_by_seconds() -> None:
    step_time = exact()
    budget = TokenBudget(step_time, 101, 1.0)
    assert (budget.half().tokens, budget.half().seconds) == (51, 0.5)
    assert budget.take(512, 40, begins=True) == 40
    assert (budget.tokens, budget.seconds) == (61, 1.0 - chunk_s(512, 40))
    before = budget.seconds
    assert budget.take(552, 70, begins=False) == 61
    assert budget.tokens == 0
    assert budget.seconds == before - (chunk_s(552, 61) - 552 * PREFIX_S)
    assert budget.take(0, 5, begins=True) == 0
    short = TokenBudget(step_time, 100, chunk_s(512, 10) + TOKEN_S / 2)
    assert short.take(512, 40, begins=True) == 10
    assert 0 < short.seconds < TOKEN_S


def test_a_chunk_takes_as_much_time_as_its_prefix_over_the_budget() -> None:
    """Without `at_least` it gets nothing then. The prefix of 8192 tokens costs 0.25 s."""
    step_time = exact()
    for seconds in (0.1, 0.3):
        assert TokenBudget(step_time, 1000, seconds).take(8192, 500, begins=True) == (
            int(step_time.tokens_within(seconds - 0.25, 8192))
        )
        budget = TokenBudget(step_time, 1000, seconds)
        tokens = budget.take(8192, 500, begins=True, at_least=1)
        assert tokens == int(step_time.tokens_within(0.25, 8192)) > 20
        assert budget.seconds == seconds - chunk_s(8192, tokens)
    assert TokenBudget(step_time, 1000, 0.0).take(0, 500, begins=True, at_least=3) == 3
