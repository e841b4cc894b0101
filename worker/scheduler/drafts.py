"""Decides which steps verify and make drafts, and counts the accepted ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mla_router.worker.scheduler.draft_choice import DraftChoice
from mla_router.worker.scheduler.request import Request
from mla_router.worker.scheduler.step import Step
from mla_router.worker.step.plan import StepPlan
from mla_router.worker.step.result import StepResult


class StepDrafts(NamedTuple):
    verified: int  # drafts of each decode slot in the step
    made: bool  # whether the step makes drafts for the next one
    feeds_drafter: bool  # whether the drafter runs over the rows of the step


class DecodeOutcome(NamedTuple):
    """The requests, tokens and time of a step of decoding requests, on one DP rank or on all together."""

    requests: int = 0  # 0: nothing can be learned from the step
    tokens: int = 0  # given to the requests
    seconds: float = 0.0
    has_drafts: bool = False  # it verified or made drafts, or followed a step that made some
    follows_prompts: bool = False  # the drafter ran over prompts in its time


NOTHING = DecodeOutcome()


class DraftPolicy:
    """Decides which steps have drafts. Large batches have none: their decode steps are no longer bound by the reading of
    weights, and rows of drafts then cost as much as other rows."""

    def __init__(
        self,
        num_drafts: int,
        max_requests: int,
        choice: DraftChoice | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        """`num_drafts`: of a slot. `max_requests`: maximum number of requests of a step with drafts. `choice`: among
        smaller steps; by default all have drafts. `is_shared`: DP ranks choose together (`agree`)."""
        self._num_drafts = num_drafts
        self._max_requests = max_requests
        self._choice = choice
        self._is_shared = is_shared
        self._is_agreed = False  # whether the next steps of all DP ranks have drafts
        self._own_outcome = NOTHING  # of the last step, for `agree`
        self._has_made = False  # whether the last step has made drafts
        self._last = StepPlan((), (), (), (), ())

    def next_step(self, decodes: Collection[Request], prefills: Collection[Request]) -> StepDrafts:
        """Returns the drafts of the step with these requests. Each step calls it once."""
        if not self._num_drafts:
            return StepDrafts(0, made=False, feeds_drafter=False)
        wanted = self._wants(len(decodes), len(prefills))
        verifies = (
            wanted and self._has_made and bool(decodes) and len(decodes) <= self._max_requests
        )
        is_small = len(decodes) + len(prefills) <= self._max_requests
        made = wanted and is_small
        self._has_made = made
        # The drafter always runs over prompts: it could not draft after a prompt that it has not seen
        feeds_drafter = made or (bool(prefills) and is_small)
        return StepDrafts(self._num_drafts if verifies else 0, made, feeds_drafter)

    def _wants(self, decodes: int, prefills: int) -> bool:
        if self._choice is None:
            return True
        if self._is_shared:
            return self._is_agreed
        return self._choice.wants(decodes) if decodes else self._choice.expects(prefills)

    def learn(self, step: Step, result: StepResult) -> None:
        """Learns from the time of a step, and from the tokens that it gave. A DP rank keeps them for `agree`."""
        outcome = self._outcome(step, result)
        if self._is_shared:
            self._own_outcome = outcome
        else:
            self._learn(outcome)

    def take_outcome(self) -> DecodeOutcome:
        """Returns the outcome of the last step of this DP rank, once."""
        outcome, self._own_outcome = self._own_outcome, NOTHING
        return outcome

    def agree(self, outcomes: Sequence[DecodeOutcome]) -> None:
        """Learns from a step of all DP ranks, and decides whether their next steps have drafts.

        All ranks call it with the same outcomes, so all decide alike. A step takes equally long on all ranks: a rank that
        decided alone would count the time of other ranks' drafts as its own step without drafts, and would not count the
        time that its drafts cost the others.
        """
        parts = [outcome for outcome in outcomes if outcome.requests]
        if self._choice is None or not parts:
            return
        requests, tokens, seconds, has_drafts, follows = zip(*parts, strict=True)
        together = sum(requests), sum(tokens), max(seconds), any(has_drafts), any(follows)
        self._learn(DecodeOutcome(*together))
        self._is_agreed = self._choice.wants(sum(requests))

    def _outcome(self, step: Step, result: StepResult) -> DecodeOutcome:
        plan, requests = step.plan, len(step.plan.decode_slots)
        # The drafter runs after a step, within the time of the next one
        last, self._last = self._last, plan
        if not (step.is_typical and requests) or result.seconds is None or plan.chunks:
            return NOTHING
        return DecodeOutcome(
            requests,
            sum(map(len, result.tokens[:requests])),
            result.seconds,
            bool(plan.num_drafts or plan.draft_bounds or last.draft_bounds),
            last.feeds_drafter and not last.draft_bounds,
        )

    def _learn(self, outcome: DecodeOutcome) -> None:
        requests, tokens, seconds, has_drafts, follows_prompts = outcome
        if self._choice is None or not requests:
            return
        if has_drafts:
            self._choice.learn(requests, seconds, tokens / requests)
        elif not follows_prompts:  # drafts do not cost the time of the drafter over prompts
            self._choice.learn_plain(requests, seconds)


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
