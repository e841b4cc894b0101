"""The expected length of answers: it falls with every step and rises to the observed length after a retraction."""

from __future__ import annotations

import pytest

from mla_router.worker.config import WorkerConfig
from mla_router.worker.scheduler.estimate import OutputEstimate
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.step.engine import Capacity
from support.fake_engine import FakeEngine
from support.scripted_scheduler import generate
from support.stepped_scheduler import SteppedScheduler


def request(max_tokens: int, generated: int = 0) -> Request:
    made = Request(generate("r", [1] * 100, max_tokens))
    if generated:
        made.move_to(State.PREFILL)
        made.move_to(State.DECODE)
        made.launched_outputs = generated
        made.output = [1] * generated
    return made


def test_a_fraction_of_the_remaining_tokens_is_expected() -> None:
    estimate = OutputEstimate(1.0)
    assert estimate.ratio == 0.7
    assert estimate.length(request(1000)) == 100 + 700
    # The last token is written to the cache by the next step.
    assert estimate.length(request(1000, generated=500)) == 100 + 499 + 350
    assert estimate.length(request(1000, generated=1000)) == 100 + 999
    assert estimate.length(request(1 << 20)) == 100 + 2868  # 0.7 of 4096, the most that are counted


def test_the_ratio_falls_to_a_seventh_in_600_steps_and_starts_again_when_idle() -> None:
    estimate = OutputEstimate(1.0)
    for _ in range(300):
        estimate.step()
    assert estimate.ratio == pytest.approx((0.7 + 0.098) / 2)
    for _ in range(1000):
        estimate.step()
    assert estimate.ratio == pytest.approx(0.098)
    estimate.idle()
    assert estimate.ratio == 0.7


def test_a_retraction_raises_the_ratio_to_the_observed_one() -> None:
    estimate = OutputEstimate(0.1)
    estimate.learn([request(1000, generated=380), request(1000, generated=580)])
    assert estimate.ratio == pytest.approx(0.5)
    estimate.learn([request(1000, generated=1)])  # never lowers the ratio
    assert estimate.ratio == pytest.approx(0.5)
    estimate.learn([request(10, generated=9)])
    assert estimate.ratio == 1.0


@pytest.mark.parametrize("conservativeness", [0.01, 1.0, 10.0])
def test_the_estimate_is_at_most_the_maximal_length(conservativeness: float) -> None:
    estimate = OutputEstimate(conservativeness)
    for max_tokens in (1, 2, 50):
        for generated in range(max_tokens + 1):
            length = estimate.length(request(max_tokens, generated))
            assert 100 <= length <= 100 + max_tokens - 1
            if generated < max_tokens:  # at least one more token
                assert length >= 100 + generated


def test_the_ratio_of_an_idle_scheduler_starts_again() -> None:
    capacity = Capacity(num_pages=16, page_size=4, num_slots=1, context_length=64)
    stepped = SteppedScheduler(FakeEngine(capacity), WorkerConfig(), overlap=False)
    estimate = stepped.scheduler.planner.estimate
    stepped.turn(generate("r", [1, 2, 3], 5))
    assert estimate.ratio < 0.7
    for _ in range(6):
        stepped.turn()
    assert stepped.reason("r") == "length"
    assert estimate.ratio == 0.7
    stepped.stop()
