"""Whether shorter chunks make shorter steps."""

from __future__ import annotations

import pytest

from mla_router.worker.scheduler.elasticity import Elasticity


def of(fixed_s: float, chunks: list[float]) -> Elasticity:
    """After steps of these chunks, each of which takes `fixed_s` longer than its chunk."""
    elasticity = Elasticity()
    for prompts_s in chunks:
        elasticity.learn(prompts_s, fixed_s + prompts_s)
    return elasticity


def test_a_step_is_first_taken_to_be_in_proportion_to_its_chunk() -> None:
    assert Elasticity().value == 1.0
    assert of(10.0, [0.4] * 20).value == 1.0, "chunks of the same size say nothing"


def test_it_is_the_share_of_the_chunk_in_the_time_of_the_step() -> None:
    chunks = [0.4, 0.2, 0.4, 0.2, 0.4]
    assert of(0.0, chunks).value == pytest.approx(1.0)
    assert of(0.3, chunks).value == pytest.approx(0.5, abs=0.05)
    assert of(3.0, chunks).value < 0.2


def test_it_is_forgotten_while_chunks_stay_the_same() -> None:
    assert of(3.0, [0.4, 0.2, *[0.2] * 40]).value > 0.8


def test_one_odd_step_has_a_bounded_effect() -> None:
    elasticity = of(0.0, [0.4, 0.2, 0.4, 0.2])
    elasticity.learn(0.25, 1000.0)
    assert 0.9 < elasticity.value < 1.5
