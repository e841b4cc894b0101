"""Decides which steps verify and make drafts, and counts the accepted ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from mla_router.worker.core import StepResult
from mla_router.worker.scheduler.draft_choice import DraftChoice
from mla_router.worker.scheduler.request import Request
from mla_router.worker.scheduler.step import Step


class StepDrafts(NamedTuple):
    verified: int  # drafts of each decode slot in the step
    made: bool  # whether the step makes drafts for the next one


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
        self._had_made = False  # the last step that was learnt from

    def next_step(self, decodes: Collection[Request], prefills: Collection[Request]) -> StepDrafts:
        """Returns the drafts of the step with these requests. Each step calls it once."""
        if not self._num_drafts:
            return StepDrafts(0, made=False)
        wanted = not decodes or self._choice is None or self._choice.wants(len(decodes))
        verifies = (
            wanted and self._has_made and bool(decodes) and len(decodes) <= self._max_requests
        )
        # The drafter always runs over prompts: it could not draft behind a prompt that it has not seen
        makes = (wanted or bool(prefills)) and len(decodes) + len(prefills) <= self._max_requests
        self._has_made = makes
        return StepDrafts(self._num_drafts if verifies else 0, makes)

    def learn(self, step: Step, result: StepResult) -> None:
        """Learns from the time of a step, and from the tokens that it gave."""
        plan, requests = step.plan, len(step.plan.decode_slots)
        # The device makes the drafts of a step within the time of the next one
        follows_drafts, self._had_made = self._had_made, plan.makes_drafts
        if self._choice is None or result.seconds is None or not requests or plan.chunks:
            return
        if not (plan.num_drafts or plan.makes_drafts or follows_drafts):
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
