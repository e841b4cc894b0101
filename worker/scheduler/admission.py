"""Which requests compute prompt tokens in the next step: those that have begun, and new ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from mla_router.worker.scheduler.division import Division, Share, size_class
from mla_router.worker.scheduler.estimate import OutputEstimate
from mla_router.worker.scheduler.memory import Memory
from mla_router.worker.scheduler.pace import Allowance, Pace
from mla_router.worker.scheduler.radix_cache import Node
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.scheduler.waiting import PATIENCE, WaitingQueue

# A request waits for another one's prefill if at least this many of its tokens would come out of it.
_SHARED_TOKENS = 32
# Requests that pass one which waits for memory have this part of all pages together.
_PASSING_PART = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting request and its cached prefix: where it ends in the tree, and its pages."""

    request: Request
    node: Node
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Blocked:
    """The first that did not fit: until something has changed, nobody need try again."""

    request: Request
    num_cached: int  # pages of its prefix
    num_arrivals: int  # by then: one that comes later may be next instead
    least: float  # pages that the smallest of those behind it would have needed; infinite if there was none


class Admission:
    """The requests whose prompts are being computed, and the door to them."""

    def __init__(
        self,
        memory: Memory,
        waiting: WaitingQueue,
        estimate: OutputEstimate,
        pace: Pace,
        *,
        step_tokens: int,
        chunk_size: int,
        by_size: bool,
    ) -> None:
        """`by_size`: short prompts have half of each step, and may pass long ones that wait for memory."""
        self.memory = memory
        self.waiting = waiting
        self.estimate = estimate
        self.pace = pace
        self.step_tokens = step_tokens  # prompt tokens of one step
        self.chunk_size = chunk_size  # of them, of one request
        self.by_size = by_size
        self.prefilling: list[Request] = []  # until the whole prompt is known to be in the cache
        self._blocked: Blocked | None = None

    def continued(self, *, beside_decodes: bool) -> list[Share]:
        """The shares of those that have begun, if nobody comes."""
        if not self.prefilling:
            return []
        division = self._divide(beside_decodes)
        division.serve()
        return division.shares()

    def admit(
        self, running: Collection[Request], *, beside_decodes: bool
    ) -> tuple[list[Request], list[Share]] | None:
        """Admit those that fit into the step, beside the shares of those that have begun, and into memory.
        Returns them and the shares of all; None if nobody comes.

        One that does not fit keeps others waiting, or a stream of small ones could keep it waiting for ever.
        Those that may pass it have a part of the memory, which it does not count on. If nobody runs it fits:
        a request that could not was never accepted.
        """
        if not self.waiting or not self.memory.free_slots:
            return None
        reserved = self._reserved(running)
        if self._is_still_blocked(self.memory.room - reserved, running):
            return None
        self._blocked = None
        waits: Request | None = None  # for memory
        passing_room = 0  # pages for those that pass it
        admitted: list[Request] = []
        division = self._divide(beside_decodes)
        for candidate in self._candidates():
            request, needed = candidate.request, self._needed(candidate)
            division.serve(up_to=self._precedence(candidate))
            if division.is_spent or not self.memory.free_slots:
                break
            if waits is not None and waits.priority != request.priority:
                break
            self.memory.cache.lock(candidate.node)
            room = self.memory.room - reserved
            if needed > (room if waits is None else min(room, passing_room)):
                self.memory.cache.unlock(candidate.node)
                if waits is None:
                    waits = request
                    passing_room = self._passing_room(request, [*running, *admitted])
                self._note_blocked(candidate, needed)
                if not self.by_size:
                    break
                continue
            request.has_passed = waits is not None
            self.memory.admit(request, candidate.node, candidate.pages)
            reserved += needed
            passing_room -= needed
            admitted.append(request)
            self.prefilling.append(request)
            division.add(request)
        if not admitted:
            return None
        self.waiting.take(admitted)
        division.serve()
        return admitted, division.shares()

    def next_candidate(self) -> Candidate | None:
        """The one that `admit` would try first."""
        return next(self._candidates(), None)

    def fits(
        self, candidate: Candidate, running: Collection[Request], without: Collection[Request] = ()
    ) -> bool:
        """Whether it would find a slot and the pages that it needs, were it next; and were those `without` which
        it might be not among `running` any more."""
        if not self.memory.free_slots and not without:
            return False
        self.memory.cache.lock(candidate.node)
        room = self.memory.room_without(without)
        self.memory.cache.unlock(candidate.node)
        stay = [request for request in running if request not in without] if without else running
        return self._needed(candidate) <= room - self._reserved(stay)

    def resume(self, request: Request) -> None:
        """A running request has more that is known."""
        if request not in self.prefilling:
            self.prefilling.append(request)

    def settle(self) -> None:
        """Let go of the requests that do not run any more or whose prompts are computed."""
        if any(request.is_prompt_settled for request in self.prefilling):
            self.prefilling = [r for r in self.prefilling if not r.is_prompt_settled]

    def _candidates(self) -> Iterator[Candidate]:
        """Who may come, best first: not while another one computes what they need first."""
        starts = {self._next_tokens(r, r.tree_pages) for r in self.prefilling}
        for request in self.waiting.candidates(self.memory.cached_tokens):
            node, pages = self.memory.find_prefix(request)
            start = self._next_tokens(request, len(pages))
            if start not in starts or request.overtaken >= PATIENCE:
                yield Candidate(request, node, pages)
                starts.add(start)

    def _divide(self, beside_decodes: bool) -> Division:
        seconds = self.pace.allowed(beside_decodes=beside_decodes)
        return Division(
            self.prefilling,
            Allowance(self.pace, self.step_tokens, seconds),
            chunk_size=self.chunk_size,
            by_size=self.by_size,
        )

    def _precedence(self, candidate: Candidate) -> int:
        """Prompts that have begun go first if what is left of them is of this class or a smaller one."""
        request = candidate.request
        if request.has_begun or request.overtaken >= PATIENCE:
            return -1
        return size_class(len(request.context) - len(candidate.pages) * self.memory.page_size)

    def _note_blocked(self, candidate: Candidate, needed: int) -> None:
        if self._blocked is None:
            self._blocked = Blocked(
                candidate.request, len(candidate.pages), self.waiting.num_arrivals, math.inf
            )
        else:
            self._blocked = replace(self._blocked, least=min(self._blocked.least, needed))

    def _is_still_blocked(self, spare: int, running: Collection[Request]) -> bool:
        """Whether the first that did not fit still does not fit into `spare` pages, and none may pass it:
        answers may be expected to be shorter now."""
        blocked = self._blocked
        return (
            blocked is not None
            and blocked.request.state is State.WAITING
            and blocked.num_arrivals == self.waiting.num_arrivals
            and self._pages_of(blocked.request) - blocked.num_cached > spare
            and (
                blocked.least > spare
                or blocked.least > self._passing_room(blocked.request, running)
            )
        )

    def _passing_room(self, blocked: Request, running: Collection[Request]) -> int:
        """Pages for requests that pass one which waits for memory. They have a part of all pages together, and
        never those without which the blocked one would not fit if it ran alone."""
        pages = self.memory.capacity.num_pages
        most = min(pages // _PASSING_PART, pages - self._pages_of(blocked))
        page_size = self.memory.page_size
        return most - sum(
            self._pages_of(r) - r.num_cached // page_size for r in running if r.has_passed
        )

    def _needed(self, candidate: Candidate) -> int:
        """Pages that it will take beyond its cached prefix, probably."""
        return self._pages_of(candidate.request) - len(candidate.pages)

    def _pages_of(self, request: Request) -> int:
        return self.memory.pages_for(self.estimate.length(request))

    def _reserved(self, running: Collection[Request]) -> int:
        """Pages that those who run will still take, probably."""
        return sum(self.memory.lacking(r, self.estimate.length(r)) for r in running)

    def _next_tokens(self, request: Request, cached_pages: int) -> object:
        """What the request needs first beyond the cache, or a unique value if that is short.

        Two requests that agree in it have a common prefix that is not cached yet: the second waits
        for the first and then finds it (in-batch sharing, as SGLang does it).
        """
        at = cached_pages * self.memory.page_size
        tokens = tuple(request.context[at : min(at + _SHARED_TOKENS, request.max_cached)])
        if not self.memory.use_prefix_cache or len(tokens) < _SHARED_TOKENS:
            return request.rid
        return request.cache_salt, at, tokens
