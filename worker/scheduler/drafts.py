"""Decides which steps verify and make drafts, and counts the accepted ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from mla_router.worker.scheduler.request import Request


class StepDrafts(NamedTuple):
    verified: int  # drafts of each decode slot in the step
    made: bool  # whether the step makes drafts for the next one


class DraftPolicy:
    """Large batches have no drafts: their decode steps are no longer bound by the reading of weights, and rows of drafts
    then cost as much as other rows."""

    def __init__(self, num_drafts: int, max_requests: int) -> None:
        """`num_drafts`: of a slot. `max_requests`: most requests of a step with drafts."""
        self._num_drafts = num_drafts
        self._max_requests = max_requests
        self._has_made = False  # the last step that computed a request which takes drafts

    def next_step(self, decodes: Collection[Request], prefills: Collection[Request]) -> StepDrafts:
        """Returns the drafts of the step with these requests. Each step calls it once."""
        if not self._num_drafts:
            return StepDrafts(0, made=False)
        taken = any(request.takes_drafts for request in decodes)
        verifies = self._has_made and taken and len(decodes) <= self._max_requests
        if not taken and not any(request.takes_drafts for request in prefills):
            return StepDrafts(0, made=False)
        self._has_made = len(decodes) + len(prefills) <= self._max_requests
        return StepDrafts(self._num_drafts if verifies else 0, self._has_made)


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
