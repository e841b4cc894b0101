"""Plans the next step from host integers: no result of a launched step is needed."""

from __future__ import annotations

import time

from mla_router.worker.config import WorkerConfig
from mla_router.worker.scheduler.admission import Admission
from mla_router.worker.scheduler.draft_choice import DraftChoice
from mla_router.worker.scheduler.drafts import DraftPolicy
from mla_router.worker.scheduler.estimate import OutputEstimate
from mla_router.worker.scheduler.memory import Memory
from mla_router.worker.scheduler.prefill_budget import ChunkBudget
from mla_router.worker.scheduler.prefix_order import order_by_prefix
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.scheduler.retraction import all_but_strongest, cheapest
from mla_router.worker.scheduler.step import Step
from mla_router.worker.scheduler.step_time import StepTimeModel
from mla_router.worker.scheduler.waiting import WaitingQueue
from mla_router.worker.step.plan import Admitted, StepPlan


class Planner:
    """Keeps the waiting and the running requests, and plans their steps."""

    def __init__(self, memory: Memory, config: WorkerConfig) -> None:
        self.memory = memory
        by_size = config.schedule_policy == "lpm"
        self.step_time = StepTimeModel()
        self.waiting = WaitingQueue(least_work_first=by_size)
        self.estimate = OutputEstimate(config.schedule_conservativeness)
        self.admission = Admission(
            memory,
            self.waiting,
            self.estimate,
            self.step_time,
            step_tokens=config.max_prefill_tokens,
            chunk_size=config.chunk_size,
            by_size=by_size,
        )
        self.drafts = DraftPolicy(
            memory.capacity.num_drafts,
            config.speculative_max_bs,
            DraftChoice() if config.chooses_drafts else None,
            is_shared=config.attn_dp_size > 1,
        )
        self.mix = not config.disable_mixed_chunk
        self.by_priority = config.enable_priority_scheduling
        self.running: dict[str, Request] = {}  # by rid: requests with a slot, in order of admission
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_retracted = 0
        self._last_was_prefill = False

    def next_step(self) -> Step | None:
        """Returns a step with a decode row for each decoding request and with prompt tokens; None if there is nothing
        to compute."""
        preempted = self.by_priority and self._preempt()
        decodes = [request for request in self.running.values() if request.wants_decode]
        decodes_first = not self.mix and self._last_was_prefill and bool(decodes)
        mixed_decodes = len(decodes) if self.mix else 0
        budgets: list[ChunkBudget] = []
        if not decodes_first:
            budgets = self.admission.continued(decodes=mixed_decodes)
        admitted: list[Request] = []
        if self._retract_for_memory(decodes, budgets):
            decodes = [request for request in decodes if request.is_running]
            budgets = [budget for budget in budgets if budget.request.is_running]
        elif not decodes_first and not preempted:
            admitted, budgets = self._admit(mixed_decodes) or ([], budgets)
        if budgets and not self.mix:
            decodes = []
        self._last_was_prefill = bool(budgets)
        if not decodes and not budgets:
            return None
        self.num_steps += 1
        return self._build(decodes, budgets, admitted)

    def jump(self, request: Request, run: list[int]) -> list[int]:
        """Jump-forward: the next step of `request` computes all of `run`, the tokens that its grammar forces. The step
        that has just been sampled gives the first of them. Returns the other tokens; none if the request takes them
        one by one."""
        # Without mixed steps all other requests would wait for it
        if not self.mix or not request.may_jump:
            return []
        following = request.jump(run)
        if request.state is State.PREFILL:
            self.admission.resume(request)
        return following

    def remove(self, request: Request) -> None:
        """Removes a waiting or running request that has ended."""
        if self.running.pop(request.rid, None) is None:
            self.waiting.remove(request)
        else:
            self._release(request)

    def _admit(self, decodes: int) -> tuple[list[Request], list[ChunkBudget]] | None:
        found = self.admission.admit(self.running.values(), decodes=decodes)
        if found is None:
            return None
        for request in found[0]:
            self.running[request.rid] = request
            if not request.was_retracted:
                request.queue_seconds = time.monotonic() - request.arrived_at
                self.num_prompt_tokens += len(request.context)
                self.num_cached_tokens += request.num_cached
        return found

    def _preempt(self) -> bool:
        """Retracts requests of lower priority until the next candidate fits, if it then can fit. Returns whether any
        was retracted. The candidate is admitted in the next step: a request must not be retracted and admitted in one
        step."""
        highest = next((request.priority for request in self.waiting), None)
        if highest is None or all(r.priority >= highest for r in self.running.values()):
            return False
        candidate = self.admission.next_candidate()
        if candidate is None or self.admission.fits(candidate, self.running.values()):
            return False
        running = self.running.values()
        lower = {r for r in running if r.priority < candidate.request.priority}
        if not lower or not self.admission.fits(candidate, running, without=lower):
            return False
        while not self.admission.fits(candidate, running):
            victim = cheapest(lower)
            lower.remove(victim)
            self._retract(victim)
        return True

    def _retract_for_memory(self, decodes: list[Request], budgets: list[ChunkBudget]) -> bool:
        """Retracts requests until the pages suffice for the rows of the others. Returns whether any was retracted: then
        the step admits no request, which would take the freed pages."""
        needs = {
            request: self.memory.lacking(request, bound)
            for request in decodes
            if (bound := request.draft_bound(request.decode_bound(request.tokens_per_row)))
            > request.place.allocated_tokens
        }
        needs |= {budget.request: self._lacking(budget) for budget in budgets}
        needed = sum(needs.values())
        if needed <= self.memory.room:
            self.estimate.step()
            return False
        while needed > self.memory.room:
            victim = cheapest(all_but_strongest(self.running.values()))
            needed -= needs.get(victim, 0)
            self._retract(victim)
        self.estimate.learn(self.running.values())
        return True

    def _lacking(self, budget: ChunkBudget) -> int:
        request = budget.request
        length = request.draft_bound(request.launched_prompt + budget.tokens)
        return self.memory.lacking(request, length)

    def _retract(self, request: Request) -> None:
        del self.running[request.rid]
        request.retract()
        self._release(request)
        self.waiting.add(request)
        self.num_retracted += 1

    def _release(self, request: Request) -> None:
        self.memory.release(request)
        self.admission.remove_computed()

    def _build(
        self, decodes: list[Request], budgets: list[ChunkBudget], admitted: list[Request]
    ) -> Step:
        writes = [write for r in admitted for write in self.memory.prefix_writes(r)]
        decodes = order_by_prefix(decodes)
        prefills = [budget.request for budget in budgets]
        drafts = self.drafts.next_step(decodes, prefills)
        bounds, draft_bounds = list[int](), list[int]()
        for request in decodes:
            bound = request.take_decode(min(request.tokens_per_row, 1 + drafts.verified))
            bounds.append(bound)
            if drafts.made:
                bound = request.draft_bound(bound)
                draft_bounds.append(bound)
            if bound > request.place.allocated_tokens:
                writes += self.memory.grow(request, bound)
        chunks = []
        for request, budget in zip(prefills, budgets, strict=True):
            chunk = request.take_chunk(budget.tokens)
            chunks.append(chunk)
            bound = request.launched_prompt
            if drafts.made and chunk.is_last:
                bound = request.draft_bound(bound)
                draft_bounds.append(bound)
            writes += self.memory.grow(request, bound)
        sampled = decodes + [r for r in prefills if r.state is State.DECODE]
        plan = StepPlan(
            decode_slots=tuple([request.place.slot for request in decodes]),
            decode_bounds=tuple(bounds),
            chunks=tuple(chunks),
            page_writes=tuple(writes),
            admitted=tuple(
                Admitted(
                    r.place.slot,
                    r.sampling,
                    r.message.prompt,
                    r.context[len(r.prompt) :],
                    r.message.prediction,
                )
                for r in admitted
            ),
            num_drafts=drafts.verified,
            tree_nodes=self.memory.capacity.tree_nodes if drafts.verified else 0,
            feeds_drafter=drafts.feeds_drafter,
            draft_bounds=tuple(draft_bounds),
            returns_drafts=drafts.made and any(r.grammar is not None for r in sampled),
        )
        return Step(plan, prefills, sampled, predicted_s=self.step_time.step_s(plan))
