"""Plans the next step from integers that the host has: no result of a launched step is needed."""

from __future__ import annotations

import time

from mla_router.worker.config import WorkerConfig
from mla_router.worker.core import Admitted, StepPlan
from mla_router.worker.scheduler.admission import Admission
from mla_router.worker.scheduler.division import Share
from mla_router.worker.scheduler.estimate import OutputEstimate
from mla_router.worker.scheduler.memory import Memory
from mla_router.worker.scheduler.neighbours import neighbours
from mla_router.worker.scheduler.pace import Pace
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.scheduler.retraction import all_but_strongest, cheapest
from mla_router.worker.scheduler.step import Step
from mla_router.worker.scheduler.waiting import WaitingQueue


class Planner:
    """The requests that wait and those that run, and what the next step does for them."""

    def __init__(self, memory: Memory, config: WorkerConfig) -> None:
        self.memory = memory
        by_size = config.schedule_policy == "lpm"
        self.pace = Pace()
        self.waiting = WaitingQueue(least_work_first=by_size)
        self.estimate = OutputEstimate(config.schedule_conservativeness)
        self.admission = Admission(
            memory,
            self.waiting,
            self.estimate,
            self.pace,
            step_tokens=config.max_prefill_tokens,
            chunk_size=config.chunk_size,
            by_size=by_size,
        )
        self.mix = not config.disable_mixed_chunk
        self.preempt = config.enable_priority_scheduling
        self.running: dict[str, Request] = {}  # by rid: those with a slot, in order of admission
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_retracted = 0
        self._last_was_prefill = False

    def next_step(self) -> Step | None:
        """A row for every running request that wants a token, and prompt tokens beside them; None if
        there is nothing to compute."""
        made_way = self.preempt and self._make_way()
        decodes = [request for request in self.running.values() if request.wants_decode]
        decodes_first = not self.mix and self._last_was_prefill and bool(decodes)
        beside_decodes = self.mix and bool(decodes)
        shares: list[Share] = []
        if not decodes_first:
            shares = self.admission.continued(beside_decodes=beside_decodes)
        admitted: list[Request] = []
        if self._make_room(decodes, shares):
            decodes = [request for request in decodes if request.slot >= 0]
            shares = [share for share in shares if share.request.slot >= 0]
        elif not decodes_first and not made_way:
            admitted, shares = self._admit(beside_decodes) or ([], shares)
        if shares and not self.mix:
            decodes = []
        self._last_was_prefill = bool(shares)
        if not decodes and not shares:
            return None
        self.num_steps += 1
        return self._build(decodes, shares, admitted)

    def jump(self, request: Request, run: list[int]) -> list[int]:
        """The next step of `request` computes all of `run`, of which the step that has just been
        sampled gives the first token. Returns the others; none if it takes them one by one."""
        if not self.mix or not request.may_jump:  # unmixed, all others would wait for it
            return []
        following = request.jump(run)
        if request.state is State.PREFILL:
            self.admission.resume(request)
        return following

    def remove(self, request: Request) -> None:
        """Let go of a request that has ended, wherever it is."""
        if self.running.pop(request.rid, None) is None:
            self.waiting.remove(request)
        else:
            self._let_go(request)

    def _admit(self, beside_decodes: bool) -> tuple[list[Request], list[Share]] | None:
        coming = self.admission.admit(self.running.values(), beside_decodes=beside_decodes)
        for request in coming[0] if coming else ():
            self.running[request.rid] = request
            if not request.was_retracted:
                request.queue_seconds = time.monotonic() - request.arrived_at
                self.num_prompt_tokens += len(request.context)
                self.num_cached_tokens += request.num_cached
        return coming

    def _make_way(self) -> bool:
        """Retract requests of lower priority until the next one fits, if it can be made to; returns whether
        any had to go. It comes in the next step: whoever is retracted must not come back in the same."""
        highest = next((request.priority for request in self.waiting), None)
        if highest is None or all(r.priority >= highest for r in self.running.values()):
            return False
        following = self.admission.next_candidate()
        if following is None or self.admission.fits(following, self.running.values()):
            return False
        running = self.running.values()
        lower = {r for r in running if r.priority < following.request.priority}
        if not lower or not self.admission.fits(following, running, without=lower):
            return False
        while not self.admission.fits(following, running):
            victim = cheapest(lower)
            lower.remove(victim)
            self._retract(victim)
        return True

    def _make_room(self, decodes: list[Request], shares: list[Share]) -> bool:
        """Retract requests until the pages suffice for the rows of the others; returns whether any
        had to go. Then nobody is admitted: it would be as if they had gone for it."""
        needs = {r: int(r.next_decode_length > r.held_tokens) for r in decodes}
        needs |= {share.request: self._lacking(share) for share in shares}
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

    def _lacking(self, share: Share) -> int:
        return self.memory.lacking(share.request, share.request.launched_prompt + share.tokens)

    def _retract(self, request: Request) -> None:
        del self.running[request.rid]
        request.retract()
        self._let_go(request)
        self.waiting.add(request)
        self.num_retracted += 1

    def _let_go(self, request: Request) -> None:
        self.memory.release(request)
        self.admission.settle()

    def _build(self, decodes: list[Request], shares: list[Share], admitted: list[Request]) -> Step:
        writes = [(r.slot, i, page) for r in admitted for i, page in enumerate(r.pages)]
        decodes = neighbours(decodes)
        lengths = []
        for request in decodes:
            length = request.take_decode()
            lengths.append(length)
            if length > request.held_tokens:
                writes += self.memory.grow(request, length)
        chunks = []
        for share in shares:
            chunks.append(share.request.take_chunk(share.tokens))
            writes += self.memory.grow(share.request, share.request.launched_prompt)
        prefills = [share.request for share in shares]
        plan = StepPlan(
            decode_slots=tuple([request.slot for request in decodes]),
            decode_lengths=tuple(lengths),
            chunks=tuple(chunks),
            page_writes=tuple(writes),
            admitted=tuple(
                Admitted(r.slot, r.sampling, r.prompt, r.context[len(r.prompt) :]) for r in admitted
            ),
        )
        return Step(plan, prefills, decodes + [r for r in prefills if r.state is State.DECODE])
