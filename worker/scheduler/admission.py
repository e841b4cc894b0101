"""Who computes prompt tokens in the next step: prompts under way first, then new ones in order of
arrival."""

from __future__ import annotations

from collections import deque

from mla_router.worker.scheduler.memory import Memory
from mla_router.worker.scheduler.request import Request

# A request waits for another one's prefill if at least this many of its tokens would come out of it.
_SHARED_TOKENS = 32
# Waiting requests looked at in one step; those behind them keep their place.
_SCAN_LIMIT = 64


class Admission:
    """The waiting requests, and those whose prompts are being computed."""

    def __init__(self, memory: Memory, chunk_size: int) -> None:
        self.memory = memory
        self.chunk_size = chunk_size
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []  # until the whole prompt is known to be in the cache
        # Who did not fit, and how much had been given back by then: until more is, it need not try.
        self._blocked: tuple[Request, int] | None = None

    def next_prefills(self) -> tuple[list[tuple[Request, int]], list[Request]]:
        """Spend one step's budget of prompt tokens.

        Returns (request, its share of the budget) in order, and which of them are new. First come,
        first served: a request that does not fit yet keeps those behind it waiting, or a stream of
        small ones could keep it waiting for ever.
        """
        budget = self.chunk_size
        shares: list[tuple[Request, int]] = []
        for request in self.prefilling:
            budget -= self._share(request, budget, shares)
        if not self.waiting:
            return shares, []
        starts = {self._next_tokens(r, r.tree_pages) for r in self.prefilling}
        admitted: list[Request] = []
        held_back: list[Request] = []
        for _ in range(min(len(self.waiting), _SCAN_LIMIT)):
            request = self.waiting[0]
            if budget == 0 or self._blocked == (request, self.memory.num_releases):
                break
            node, pages = self.memory.find_prefix(request)
            start = self._next_tokens(request, len(pages))
            if start in starts:
                held_back.append(self.waiting.popleft())
                continue
            if not self.memory.admit(request, node, pages):
                self._blocked = request, self.memory.num_releases
                break
            starts.add(start)
            admitted.append(self.waiting.popleft())
            self.prefilling.append(request)
            budget -= self._share(request, budget, shares)
        self.waiting.extendleft(reversed(held_back))
        return shares, admitted

    def settle(self) -> None:
        """Let go of the requests that ended or whose prompts are computed."""
        if any(request.is_prompt_settled for request in self.prefilling):
            self.prefilling = [r for r in self.prefilling if not r.is_prompt_settled]

    def _share(self, request: Request, budget: int, shares: list[tuple[Request, int]]) -> int:
        tokens = min(budget, len(request.context) - request.launched_prompt)
        if tokens > 0:
            shares.append((request, tokens))
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
