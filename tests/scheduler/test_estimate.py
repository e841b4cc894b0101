"""What answers are expected to need: falls while all goes well, rises to what was seen."""

from __future__ import annotations

import pytest

from mla_router.worker.scheduler.estimate import OutputEstimate
from mla_router.worker.scheduler.request import Request, State
from support.scripted_scheduler import generate


def request(max_tokens: int, generated: int = 0) -> Request:
    made = Request("r", [1] * 100, generate("", [], max_tokens).sampling)
    if generated:
        made.move_to(State.PREFILL)
        made.move_to(State.DECODE)
        made.launched_outputs = generated
        made.output = [1] * generated
    return made


def test_a_share_of_what_may_come_is_expected() -> None:
    estimate = OutputEstimate(1.0)
    assert estimate.ratio == 0.7
    assert estimate.length(request(1000)) == 100 + 700
    # The newest token is not in the cache: it gets there with the next step.
    assert estimate.length(request(1000, generated=500)) == 100 + 499 + 350
    assert estimate.length(request(1000, generated=1000)) == 100 + 999
    assert estimate.length(request(1 << 20)) == 100 + 2868  # 0.7 of the 4096 that are looked at


def test_it_falls_to_a_seventh_in_600_steps_and_starts_again_when_idle() -> None:
    estimate = OutputEstimate(1.0)
    for _ in range(300):
        estimate.step()
    assert estimate.ratio == pytest.approx((0.7 + 0.098) / 2)
    for _ in range(1000):
        estimate.step()
    assert estimate.ratio == pytest.approx(0.098)
    estimate.idle()
    assert estimate.ratio == 0.7


def test_a_retraction_raises_it_to_what_is_running() -> None:
    estimate = OutputEstimate(0.1)
    estimate.learn([request(1000, generated=380), request(1000, generated=580)])
    assert estimate.ratio == pytest.approx(0.5)
    estimate.learn([request(1000, generated=1)])  # never down
    assert estimate.ratio == pytest.approx(0.5)
    estimate.learn([request(10, generated=9)])
    assert estimate.ratio == 1.0


@pytest.mark.parametrize("conservativeness", [0.01, 1.0, 10.0])
def test_no_more_is_expected_than_can_come(conservativeness: float) -> None:
    estimate = OutputEstimate(conservativeness)
    for max_tokens in (1, 2, 50):
        for generated in range(max_tokens + 1):
            length = estimate.length(request(max_tokens, generated))
            assert 100 <= length <= 100 + max_tokens - 1
            if generated < max_tokens:  # at least the next token
                assert length >= 100 + generated
