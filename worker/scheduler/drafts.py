"""Decides which steps verify and make drafts, and counts the accepted ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from mla_router.worker.core import StepPlan, StepResult
from mla_router.worker.scheduler.draft_choice import DraftChoice
from mla_router.worker.scheduler.request import Request
from mla_router.worker.scheduler.step import Step


class StepDrafts(NamedTuple):
    verified: int  # drafts of each decode slot in the step
    made: bool  # whether the step makes drafts for the next one
    followed: bool  # whether the drafter runs over its rows


class DraftPolicy:
    """Large batches have no drafts: their decode steps are no longer bound by the reading of weights, and rows of drafts
    then cost as much as other rows."""

    def __init__(
        self, num_drafts: int, max_requests: int, choice: DraftChoice | None = None
    ) -> None:
        """`num_drafts`: of a slot. `max_requests`: most requests of a step with drafts. `choice`: among smaller steps; by
        default all have drafts."""
        self._num_drafts = num_drafts
        self._max_requests = max_requests
        self._choice = choice
        self._has_made = False  # the last step
        self._last = StepPlan((), (), (), (), ())  # that was learnt from

    def next_step(self, decodes: Collection[Request], prefills: Collection[Request]) -> StepDrafts:
        """Returns the drafts of the step with these requests. Each step calls it once."""
        if not self._num_drafts:
            return StepDrafts(0, made=False, followed=False)
        wanted = self._wants(len(decodes), len(prefills))
        verifies = (
            wanted and self._has_made and bool(decodes) and len(decodes) <= self._max_requests
        )
        is_small = len(decodes) + len(prefills) <= self._max_requests
        made = wanted and is_small
        self._has_made = made
        # The drafter always runs over prompts: it could not draft behind a prompt that it has not seen
        followed = made or (bool(prefills) and is_small)
        return StepDrafts(self._num_drafts if verifies else 0, made, followed)

    def _wants(self, decodes: int, prefills: int) -> bool:
        if self._choice is None:
            return True
        return self._choice.wants(decodes) if decodes else self._choice.expects(prefills)

    def learn(self, step: Step, result: StepResult) -> None:
        """Learns from the time of a step, and from the tokens that it gave."""
        plan, requests = step.plan, len(step.plan.decode_slots)
        # The drafter runs behind a step, within the time of the next one
        last, self._last = self._last, plan
        if self._choice is None or result.seconds is None or not requests or plan.chunks:
            return
        if not (plan.num_drafts or plan.draft_bounds or last.draft_bounds):
            if not last.makes_drafts:  # drafts do not cost the time of the drafter over prompts
                self._choice.learn_plain(requests, result.seconds)
            return
        given = sum(map(len, result.tokens[:requests]))
        self._choice.learn(requests, result.seconds, given / requests)


@dataclass(slots=True)
class DraftCounts:
    """Drafts that were verified, of all requests."""

    steps: int = 0  # decode steps of a request with drafts
    proposed: int = 0
    accepted: int = 0

    def count(self, *, proposed: int, accepted: int) -> None:
        self.steps += 1
        self.proposed += proposed
        self.accepted += max(0, accepted)
