"""The choice between steps with and without drafts, by made-up times."""

from __future__ import annotations

from mla_router.worker.scheduler.draft_choice import LEARNT, SHORTEST_PAUSE, TRIED, DraftChoice


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
    had = serve(DraftChoice(), 1000, 8, cost=1.5, tokens=2.0)
    assert had == [False] * LEARNT + [True] * (1000 - LEARNT)


def test_drafts_that_cost_more_are_rare() -> None:
    choice = DraftChoice()
    had = serve(choice, 100_000, 8, cost=2.5, tokens=1.2)
    assert had[: LEARNT + TRIED + 1] == [False] * LEARNT + [True] * TRIED + [False]
    given = sum(1.2 if drafts else 1.0 for drafts in had)
    seconds = sum(2.5 if drafts else 1.0 for drafts in had)
    assert given / seconds > 0.98
    # Other text: the next trial pays, and drafts stay
    assert all(serve(choice, 10_000, 8, cost=2.5, tokens=3.4)[-1000:])


def test_batch_sizes_are_measured_apart() -> None:
    choice = DraftChoice()
    serve(choice, 200, 1, cost=2.5, tokens=2.0)
    assert serve(choice, 200, 32, cost=1.3, tokens=2.0)[-1]
    assert not choice.wants(1)
    assert choice.wants(63)


def test_one_slow_step_does_not_decide() -> None:
    choice = DraftChoice()
    serve(choice, LEARNT + 2 * TRIED, 8, cost=1.3, tokens=2.0)
    choice.learn(8, 100.0, 2.0)
    assert all(serve(choice, SHORTEST_PAUSE, 8, cost=1.3, tokens=2.0))
