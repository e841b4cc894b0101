"""Admission: selects the requests that compute prompt tokens in the next step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from mla_router.worker.scheduler.estimate import OutputEstimate
from mla_router.worker.scheduler.memory import Memory
from mla_router.worker.scheduler.prefill_budget import ChunkBudget, PrefillBudget, size_class
from mla_router.worker.scheduler.radix_cache import Node
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.scheduler.step_time import StepTimeModel, TokenBudget
from mla_router.worker.scheduler.waiting import MAX_OVERTAKEN, WaitingQueue

# A request waits for the prefill of another one if they share at least this many uncached tokens.
_SHARED_TOKENS = 32
# Requests may overtake a request that waits for memory, with at most 1/_PASSING_PART of all pages together.
_PASSING_PART = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting request and its cached prefix: its last node in the tree, and its pages."""

    request: Request
    node: Node
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Blocked:
    """The first request that did not fit into memory. Admission is not tried again before something has changed."""

    request: Request
    num_cached: int  # pages that it did not need, because of its cached prefix
    num_arrivals: int  # of the waiting queue at that time: a later arrival may go first
    least: float  # pages needed by the smallest request behind it that did not fit either; infinite without one


class Admission:
    """Keeps the requests in prefill, and admits waiting ones."""

    def __init__(
        self,
        memory: Memory,
        waiting: WaitingQueue,
        estimate: OutputEstimate,
        step_time: StepTimeModel,
        *,
        step_tokens: int,
        chunk_size: int,
        by_size: bool,
    ) -> None:
        """`by_size`: short prompts have half of each step, and may pass long prompts that wait for memory."""
        self.memory = memory
        self.waiting = waiting
        self.estimate = estimate
        self.step_time = step_time
        self.step_tokens = step_tokens  # maximum number of tokens of one step with prompts
        self.chunk_size = chunk_size  # maximum number of prompt tokens of one request in one step
        self.by_size = by_size
        self.prefilling: list[Request] = []  # until their whole context is computed
        self._blocked: Blocked | None = None

    def continued(self, *, decodes: int) -> list[ChunkBudget]:
        """Returns the budgets of the requests in prefill, without an admission. `decodes`: decode rows of the step."""
        if not self.prefilling:
            return []
        budget = self._new_budget(decodes)
        budget.distribute()
        return budget.chunks()

    def admit(
        self, running: Collection[Request], *, decodes: int
    ) -> tuple[list[Request], list[ChunkBudget]] | None:
        """Admits requests that fit into memory and into the step, in addition to the requests in prefill. Returns the admitted
        requests and the budgets of all; None if no request is admitted.

        A request that does not fit blocks those behind it: otherwise a stream of small requests could block it for
        ever. Some requests may pass it within a bounded part of the memory, on which it does not count. It fits at the
        latest when no other request runs, because a larger request is refused on arrival.
        """
        if not self.waiting or not self.memory.free_slots:
            return None
        reserved = self._reserved(running)
        if self._is_still_blocked(self.memory.room - reserved, running):
            return None
        self._blocked = None
        blocked: Request | None = None  # waits for memory
        passing_room = 0  # pages for the requests that pass it
        admitted: list[Request] = []
        budget = self._new_budget(decodes)
        for candidate in self._candidates():
            request, needed = candidate.request, self._needed(candidate)
            budget.distribute(up_to=self._precedence(candidate))
            if budget.is_spent or not self.memory.free_slots:
                break
            if blocked is not None and blocked.priority != request.priority:
                break
            self.memory.cache.lock(candidate.node)
            room = self.memory.room - reserved
            if needed > (room if blocked is None else min(room, passing_room)):
                self.memory.cache.unlock(candidate.node)
                if blocked is None:
                    blocked = request
                    passing_room = self._passing_room(request, [*running, *admitted])
                self._note_blocked(candidate, needed)
                if not self.by_size:
                    break
                continue
            request.has_passed = blocked is not None
            self.memory.admit(request, candidate.node, candidate.pages)
            reserved += needed
            passing_room -= needed
            admitted.append(request)
            self.prefilling.append(request)
            budget.add(request)
        if not admitted:
            return None
        self.waiting.take(admitted)
        budget.distribute()
        return admitted, budget.chunks()

    def next_candidate(self) -> Candidate | None:
        """Returns the candidate that `admit` would try first."""
        return next(self._candidates(), None)

    def fits(
        self, candidate: Candidate, running: Collection[Request], without: Collection[Request] = ()
    ) -> bool:
        """Returns whether there are a slot and enough pages for `candidate`, after the retraction of the requests
        `without`."""
        if not self.memory.free_slots and not without:
            return False
        self.memory.cache.lock(candidate.node)
        room = self.memory.room_without(without)
        self.memory.cache.unlock(candidate.node)
        stay = [request for request in running if request not in without] if without else running
        return self._needed(candidate) <= room - self._reserved(stay)

    def resume(self, request: Request) -> None:
        """Returns a decoding request to prefill, after a jump."""
        if request not in self.prefilling:
            self.prefilling.append(request)

    def remove_computed(self) -> None:
        """Removes the requests whose context is computed, and those that do not run any more."""
        if any(request.is_context_computed for request in self.prefilling):
            self.prefilling = [r for r in self.prefilling if not r.is_context_computed]

    def _candidates(self) -> Iterator[Candidate]:
        """Yields the candidates, best first, without requests whose uncached prefix another request computes, or would
        compute if it were admitted. One that was overtaken too often waits only for a prefix that is being computed:
        by a request of its priority this takes at most about twice the time of its own computation (`prefill_budget.py`).
        """
        by_priority = sorted(self.prefilling, key=lambda r: r.priority)
        computed = {self._next_tokens(r, r.place.tree_pages): r.priority for r in by_priority}
        tried = set[object]()
        for request in self.waiting.candidates(self.memory.cached_tokens):
            node, pages = self.memory.find_prefix(request)
            start = self._next_tokens(request, len(pages))
            if request.overtaken >= MAX_OVERTAKEN:
                waits = computed.get(start, request.priority - 1) >= request.priority
            else:
                waits = start in computed or start in tried
            if waits:
                continue
            yield Candidate(request, node, pages)
            if request.state is State.WAITING:
                tried.add(start)
            else:
                computed[start] = request.priority

    def _new_budget(self, decodes: int) -> PrefillBudget:
        """Decode rows take their part of the step's tokens, at most half: a full step has the rows of the largest
        captured graph, whatever its mixture."""
        seconds = self.step_time.allowed(beside_decodes=decodes > 0)
        tokens = max(self.step_tokens - decodes, -(-self.step_tokens // 2))
        return PrefillBudget(
            self.prefilling,
            TokenBudget(self.step_time, tokens, seconds),
            chunk_size=self.chunk_size,
            by_size=self.by_size,
        )

    def _precedence(self, candidate: Candidate) -> int:
        """Returns the size class up to which requests in prefill go before this candidate."""
        request = candidate.request
        if request.has_started_answer or request.overtaken >= MAX_OVERTAKEN:
            return -1
        return size_class(len(request.context) - len(candidate.pages) * self.memory.page_size)

    def _note_blocked(self, candidate: Candidate, needed: int) -> None:
        if self._blocked is None:
            self._blocked = Blocked(
                candidate.request,
                self._pages_of(candidate.request) - needed,
                self.waiting.num_arrivals,
                math.inf,
            )
        else:
            self._blocked = replace(self._blocked, least=min(self._blocked.least, needed))

    def _is_still_blocked(self, spare: int, running: Collection[Request]) -> bool:
        """Returns whether the blocked request still does not fit into `spare` pages, and no request may pass it. Its
        need shrinks when the expected length of answers falls."""
        blocked = self._blocked
        return (
            blocked is not None
            and blocked.request.state is State.WAITING
            and blocked.num_arrivals == self.waiting.num_arrivals
            and self._pages_of(blocked.request) - blocked.num_cached > spare
            and (
                blocked.least > spare  # usual, and cheaper: the other sums over all that run
                or blocked.least > self._passing_room(blocked.request, running)
            )
        )

    def _passing_room(self, blocked: Request, running: Collection[Request]) -> int:
        """Returns the pages that are left for requests which pass `blocked`. All that have passed together have a fixed
        part of all pages, and always leave enough for `blocked` to run alone."""
        pages = self.memory.capacity.num_pages
        limit = min(pages // _PASSING_PART, pages - self._pages_of(blocked))
        page_size = self.memory.page_size
        return limit - sum(
            self._pages_of(r) - self._pages_of_prefix(r.num_cached // page_size)
            for r in running
            if r.has_passed
        )

    def _needed(self, candidate: Candidate) -> int:
        """Returns the expected number of pages of the candidate beyond its cached prefix."""
        cached = self._pages_of_prefix(len(candidate.pages))
        read = self.memory.taken_by_prefix(candidate.pages)
        return self._pages_of(candidate.request) - cached + read

    def _pages_of(self, request: Request) -> int:
        return self.memory.pages_for(self.estimate.length(request))

    def _pages_of_prefix(self, pages: int) -> int:
        """Returns the number of `pages` of a cached prefix and of their window pages, if there are any."""
        return self.memory.pages_for(pages * self.memory.page_size)

    def _reserved(self, running: Collection[Request]) -> int:
        """Returns the expected number of pages that the running requests will still take."""
        return sum(self.memory.lacking(r, self.estimate.length(r)) for r in running)

    def _next_tokens(self, request: Request, cached_pages: int) -> object:
        """Returns the first uncached tokens of the request, or a unique value if there are few.

        Two requests with equal values share a prefix that is not cached yet. The second waits for the first and then
        finds the prefix in the cache (in-batch prefix sharing, as in SGLang).
        """
        at = cached_pages * self.memory.page_size
        tokens = tuple(request.context[at : min(at + _SHARED_TOKENS, request.max_cached)])
        if not self.memory.use_prefix_cache or len(tokens) < _SHARED_TOKENS:
            return request.rid
        return request.message.cache_salt, at, tokens
