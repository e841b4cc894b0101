"""Who computes prompt tokens in the next step: prompts under way first, then new ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mla_router.worker.scheduler.estimate import OutputEstimate
from mla_router.worker.scheduler.memory import Memory
from mla_router.worker.scheduler.radix_cache import Node
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.scheduler.waiting import PATIENCE, WaitingQueue

# A request waits for another one's prefill if at least this many of its tokens would come out of it.
_SHARED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Share:
    """Prompt tokens that a request may compute in a step."""

    request: Request
    tokens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting request and its cached prefix: where it ends in the tree, and its pages."""

    request: Request
    node: Node
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Blocked:
    """Who was next and did not fit: until something has changed, nobody need try again."""

    request: Request
    num_cached: int  # pages of its prefix
    num_arrivals: int  # by then: somebody who comes later may be next instead


class Admission:
    """The requests whose prompts are being computed, and the door to them."""

    def __init__(
        self,
        memory: Memory,
        waiting: WaitingQueue,
        estimate: OutputEstimate,
        *,
        step_tokens: int,
        chunk_size: int,
    ) -> None:
        self.memory = memory
        self.waiting = waiting
        self.estimate = estimate
        self.step_tokens = step_tokens  # prompt tokens of one step
        self.chunk_size = chunk_size  # of them, of one request
        self.prefilling: list[Request] = []  # until the whole prompt is known to be in the cache
        self._blocked: Blocked | None = None

    def continued(self) -> list[Share]:
        """The shares of those that have begun: first those that jump, which want few tokens and whose answers
        others' prompts must not hold up; then strongest claim first."""
        shares: list[Share] = []
        left = self.step_tokens
        for request in sorted(self.prefilling, key=lambda r: (not r.is_jumping, r.seniority)):
            left -= self._share(request, left, shares)
        return shares

    def admit(self, running: Collection[Request], shares: list[Share]) -> list[Request]:
        """Admit those that fit into what `shares` leave of the budget, and into memory; returns
        them, and adds their shares.

        One that does not fit keeps those behind it waiting, or a stream of small ones could keep it
        waiting for ever. If nobody runs it fits: what could not was never accepted.
        """
        left = self.step_tokens - sum(share.tokens for share in shares)
        if left == 0 or not self.waiting or not self.memory.free_slots:
            return []
        reserved = self._reserved(running)
        if self._is_still_blocked(self.memory.room - reserved):
            return []
        self._blocked = None
        admitted: list[Request] = []
        for candidate in self._candidates():
            if left == 0 or not self.memory.free_slots:
                break
            request, needed = candidate.request, self._needed(candidate)
            self.memory.cache.lock(candidate.node)
            if needed + reserved > self.memory.room:
                self.memory.cache.unlock(candidate.node)
                self._blocked = Blocked(request, len(candidate.pages), self.waiting.num_arrivals)
                break
            self.memory.admit(request, candidate.node, candidate.pages)
            reserved += needed
            admitted.append(request)
            self.prefilling.append(request)
            left -= self._share(request, left, shares)
        self.waiting.take(admitted)
        return admitted

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

    def _is_still_blocked(self, spare: int) -> bool:
        """Whether who was next is, and does not fit into `spare` pages: answers may be expected to be shorter now."""
        blocked = self._blocked
        return (
            blocked is not None
            and blocked.request.state is State.WAITING
            and blocked.num_arrivals == self.waiting.num_arrivals
            and self._pages_of(blocked.request) - blocked.num_cached > spare
        )

    def _needed(self, candidate: Candidate) -> int:
        """Pages that it will take beyond its cached prefix, probably."""
        return self._pages_of(candidate.request) - len(candidate.pages)

    def _pages_of(self, request: Request) -> int:
        return self.memory.pages_for(self.estimate.length(request))

    def _reserved(self, running: Collection[Request]) -> int:
        """Pages that those who run will still take, probably."""
        return sum(self.memory.lacking(r, self.estimate.length(r)) for r in running)

    def _share(self, request: Request, left: int, shares: list[Share]) -> int:
        tokens = min(left, self.chunk_size, len(request.context) - request.launched_prompt)
        if tokens > 0:
            shares.append(Share(request, tokens))
        return tokens

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
