"""The steps that verify and make drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mla_router.worker.scheduler.draft_choice import LEARNT, DraftChoice
from mla_router.worker.scheduler.drafts import NOTHING, DraftPolicy, StepDrafts
from mla_router.worker.scheduler.request import Request
from mla_router.worker.scheduler.step import Step
from mla_router.worker.step.plan import PrefillChunk, StepPlan
from mla_router.worker.step.result import StepResult
from support.scripted_scheduler import generate

NONE = StepDrafts(0, made=False, feeds_drafter=False)


def requests(count: int) -> list[Request]:
    return [Request(generate(f"r{n}", [1], 9), tokens_per_row=3) for n in range(count)]


def test_drafts_are_verified_one_step_after_they_are_made() -> None:
    policy, some = DraftPolicy(2, 8), requests(4)
    assert policy.next_step([], some) == StepDrafts(0, made=True, feeds_drafter=True)
    assert policy.next_step(some, []) == StepDrafts(2, made=True, feeds_drafter=True)


def test_large_steps_have_no_drafts() -> None:
    policy, many = DraftPolicy(2, 8), requests(9)
    policy.next_step([], many[:8])
    assert policy.next_step(many[:8], many[8:]) == StepDrafts(2, made=False, feeds_drafter=False)
    assert policy.next_step(many[:8], []) == StepDrafts(0, made=True, feeds_drafter=True)
    assert policy.next_step(many, []) == NONE


def test_without_drafts_no_step_has_any() -> None:
    policy, some = DraftPolicy(0, 8), requests(2)
    assert policy.next_step([], some) == policy.next_step(some, []) == NONE


def test_prompts_have_no_drafts_before_steps_without() -> None:
    """The drafter runs over them, but the next step is one to measure the time without drafts."""
    policy, some = DraftPolicy(2, 8, DraftChoice()), requests(4)
    assert policy.next_step([], some) == StepDrafts(0, made=False, feeds_drafter=True)
    for _ in range(LEARNT):
        assert policy.next_step(some, []) == NONE
    assert policy.next_step(some, []) == StepDrafts(0, made=True, feeds_drafter=True)
    assert policy.next_step(some, []) == StepDrafts(2, made=True, feeds_drafter=True)
    assert policy.next_step([], some) == StepDrafts(0, made=True, feeds_drafter=True)


def test_the_drafter_over_a_prompt_is_no_cost_of_drafts() -> None:
    """It runs whether the next steps have drafts or not, so nothing is learnt from the step behind it."""
    learnt: list[tuple[float, ...]] = []

    class Recording(DraftChoice):
        def learn_plain(self, requests: int, seconds: float) -> None:
            learnt.append((requests, seconds))

        def learn(self, requests: int, seconds: float, tokens: float) -> None:
            learnt.append((requests, seconds, tokens))

    policy, some = DraftPolicy(2, 8, Recording()), requests(1)
    plain = StepPlan((0,), (5,), (), (), ())
    beside = replace(plain, chunks=(PrefillChunk(1, 0, (1, 2), is_last=False),), feeds_drafter=True)
    makes = replace(plain, feeds_drafter=True, draft_bounds=(7,))
    for seconds, plan in enumerate([plain, beside, plain, plain, makes, plain, plain]):
        policy.learn(Step(plan, [], some), StepResult([[7]], seconds=seconds))
    assert learnt == [(1, 0), (1, 3), (1, 4, 1), (1, 5, 1), (1, 6)]


@pytest.mark.parametrize(("tokens", "pay"), [((3.5, 1.2), True), ((2.4, 1.0), False)])
def test_dp_ranks_choose_together(tokens: tuple[float, float], pay: bool) -> None:
    """A step with drafts takes 1.9 s instead of 1 for all ranks, whichever of them has drafts. On its own the first rank would
    have some in both cases, and the second one would lose by them."""
    ranks = [DraftPolicy(3, 8, DraftChoice(), is_shared=True) for _ in tokens]
    some, given, drafted = requests(4), [0.0, 0.0], 0
    for number in range(400):
        drafts = [rank.next_step(some, []) for rank in ranks]
        assert drafts[0] == drafts[1]
        has_drafts = drafts[0].made or bool(drafts[0].verified)
        drafted += has_drafts
        for at, rank in enumerate(ranks):
            each = tokens[at] if drafts[at].verified else 1.0
            before, given[at] = int(given[at]), given[at] + each
            plan = replace(
                StepPlan((0,), (5,), (), (), ()),
                num_drafts=drafts[at].verified,
                draft_bounds=(9,) if drafts[at].made else (),
            )
            result = [[7] * (int(given[at]) - before)]
            rank.learn(Step(plan, [], some), StepResult(result, seconds=1.9 if has_drafts else 1.0))
        outcomes = [rank.take_outcome() for rank in ranks]
        for rank in ranks:
            rank.agree(outcomes if number % 50 else [NOTHING] * 2)
            assert rank.take_outcome() == NOTHING
    assert drafted > 350 if pay else drafted < 30


def test_an_idle_dp_rank_decides_nothing() -> None:
    busy, idle = (DraftPolicy(3, 8, DraftChoice(), is_shared=True) for _ in range(2))
    plain, some = StepPlan((0,), (5,), (), (), ()), requests(1)
    empty = Step(StepPlan((), (), (), (), ()), [], [])
    for _ in range(LEARNT + 1):
        assert busy.next_step(some, []) == NONE
        busy.learn(Step(plain, [], some), StepResult([[7]], seconds=1.0))
        idle.learn(empty, StepResult([], seconds=1.0))
        outcomes = busy.take_outcome(), idle.take_outcome()
        busy.agree(outcomes)
        idle.agree(outcomes)
    expected = StepDrafts(0, made=True, feeds_drafter=True)
    assert busy.next_step(some, []) == idle.next_step(some, []) == expected
