"""The choice between steps with and without drafts, by made-up times."""

from __future__ import annotations

import random

import pytest

from mla_router.worker.scheduler.draft_choice import (
    ALLOWANCE,
    LEARNT,
    RELEARNT_AFTER,
    STAKE,
    DraftChoice,
)


def serve(choice: DraftChoice, steps: int, requests: int, cost: float, tokens: float) -> list[bool]:
    """Returns which steps had drafts. A step takes a second, or `cost` with drafts, which gives `tokens`."""
    had = []
    for _ in range(steps):
        had.append(choice.wants(requests))
        if had[-1]:
            choice.learn(requests, cost, tokens)
        else:
            choice.learn_plain(requests, 1.0)
    return had


def test_drafts_that_pay_go_on() -> None:
    had = serve(DraftChoice(), RELEARNT_AFTER, 8, cost=1.5, tokens=2.0)
    assert had == [False] * LEARNT + [True] * (RELEARNT_AFTER - LEARNT)


def test_drafts_that_are_all_wrong_are_given_up_within_some_steps() -> None:
    had = serve(DraftChoice(), 100, 8, cost=2.5, tokens=1.0)
    assert had == [False] * LEARNT + [True] * 2 + [False] * (100 - LEARNT - 2)
    had = serve(DraftChoice(), 100, 1, cost=2.5, tokens=1.0)
    assert had == [False] * LEARNT + [True] * 4 + [False] * (100 - LEARNT - 4)


@pytest.mark.parametrize("cost", [1.02, 1.2, 2.5, 4.0])
@pytest.mark.parametrize("tokens", [1.0, 1.7])
def test_drafts_lose_no_more_than_the_allowance(cost: float, tokens: float) -> None:
    choice = DraftChoice()
    for steps in (400, 3000, 50_000):
        had = serve(choice, steps, 8, cost, tokens)
        given = sum(tokens if drafts else 1.0 for drafts in had)
        seconds = sum(cost if drafts else 1.0 for drafts in had)
        assert given / seconds > 0.98
        assert seconds - given <= STAKE + max(STAKE, cost) + ALLOWANCE * seconds


@pytest.mark.parametrize("requests", [1, 8, 128])
@pytest.mark.parametrize("acceptance", [0.0, 0.2])
def test_answers_of_800_tokens_lose_at_most_two_percent(requests: int, acceptance: float) -> None:
    """A new choice, and steps of 3 drafts that take 1.5 or 2.5 times as long: measured on an H100."""
    draw, choice = random.Random(requests), DraftChoice()
    cost = 2.5 if requests == 1 else 1.5
    given = seconds = 0.0
    while given < 800:
        if choice.wants(requests):
            # Tokens until the first wrong draft, a mean over the requests
            right = [[draw.random() < acceptance for _ in range(3)] for _ in range(requests)]
            tokens = sum(1 + ([*each, False].index(False)) for each in right) / requests
            choice.learn(requests, cost, tokens)
            given, seconds = given + tokens, seconds + cost
        else:
            choice.learn_plain(requests, 1.0)
            given, seconds = given + 1, seconds + 1
    assert given / seconds > 0.98


def test_drafts_come_back_with_other_text() -> None:
    choice = DraftChoice()
    serve(choice, 1000, 8, cost=2.5, tokens=1.0)
    assert sum(serve(choice, 2000, 8, cost=2.5, tokens=3.4)) > 1200


def test_drafts_that_stop_to_pay_are_given_up() -> None:
    choice = DraftChoice()
    assert serve(choice, 900, 8, cost=1.5, tokens=2.5)[-1]
    assert sum(serve(choice, 100, 8, cost=1.5, tokens=1.0)) < 60


def test_few_tokens_by_chance_do_not_end_drafts_that_pay() -> None:
    """One request with 3 drafts, of which 80% are right: 2.95 tokens a step, with a deviation of 1.2."""
    draw, ended = random.Random(0), 0
    for _ in range(20):
        choice = DraftChoice()
        for _ in range(900):
            if choice.wants(1):
                right = [draw.random() < 0.8 for _ in range(3)]
                choice.learn(1, 2.0, 1.0 + next((i for i, r in enumerate(right) if not r), 3))
            else:
                choice.learn_plain(1, 1.0)
        ended += not choice.wants(1)
    assert ended <= 1


def test_batch_sizes_are_measured_apart() -> None:
    choice = DraftChoice()
    serve(choice, 200, 1, cost=2.5, tokens=2.0)
    assert serve(choice, 200, 32, cost=1.3, tokens=2.0)[-1]
    assert not choice.wants(1)
    assert choice.wants(63)


def test_one_slow_step_does_not_decide() -> None:
    choice = DraftChoice()
    serve(choice, 100, 8, cost=1.3, tokens=2.0)
    choice.learn(8, 100.0, 2.0)
    assert all(serve(choice, 100, 8, cost=1.3, tokens=2.0))


def test_steps_without_drafts_are_measured_again() -> None:
    """Requests grow: after a while a step without drafts takes as long as one with drafts did at first."""
    choice = DraftChoice()
    serve(choice, 100, 8, cost=1.4, tokens=1.5)
    for step in range(4000):
        grown = 1 + step / 4000
        if choice.wants(8):
            choice.learn(8, 1.4 * grown, 1.5)
        else:
            choice.learn_plain(8, grown)
    assert choice.wants(8)
