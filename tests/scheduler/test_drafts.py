"""The steps that verify and make drafts."""

from __future__ import annotations

from mla_router.worker.core import SamplingParams
from mla_router.worker.scheduler.drafts import DraftPolicy, StepDrafts
from mla_router.worker.scheduler.request import Request

NONE = StepDrafts(0, made=False)


def requests(count: int) -> list[Request]:
    return [Request(f"r{n}", [1], SamplingParams(9), tokens_per_row=3) for n in range(count)]


def test_drafts_are_verified_one_step_after_they_are_made() -> None:
    policy, some = DraftPolicy(2, 8), requests(4)
    assert policy.next_step([], some) == StepDrafts(0, made=True)
    assert policy.next_step(some, []) == StepDrafts(2, made=True)


def test_large_steps_have_no_drafts() -> None:
    policy, many = DraftPolicy(2, 8), requests(9)
    policy.next_step([], many[:8])
    assert policy.next_step(many[:8], many[8:]) == StepDrafts(2, made=False)
    assert policy.next_step(many[:8], []) == StepDrafts(0, made=True)
    assert policy.next_step(many, []) == NONE


def test_without_drafts_no_step_has_any() -> None:
    policy, some = DraftPolicy(0, 8), requests(2)
    assert policy.next_step([], some) == policy.next_step(some, []) == NONE
