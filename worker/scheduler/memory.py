"""Who holds which page and slot: requests, the prefix cache, or nobody.

Pages are taken when a step needs them. Whether there are enough is decided before: by admission for
those that come, by the planner for those that run.
"""

from __future__ import annotations

from collections.abc import Collection

from mla_router.worker.core import Capacity, FinishReason
from mla_router.worker.scheduler.page_allocator import PageAllocator
from mla_router.worker.scheduler.radix_cache import Node, RadixCache
from mla_router.worker.scheduler.request import Request, State


class Memory:
    """Pages and slots of one worker. Everything adds up at any time: see `check`."""

    def __init__(self, capacity: Capacity, *, use_prefix_cache: bool) -> None:
        self.capacity = capacity
        self.page_size = capacity.page_size
        self.allocator = PageAllocator(capacity.num_pages)
        self.cache = RadixCache(capacity.page_size)
        self.use_prefix_cache = use_prefix_cache
        self.free_slots = list(range(capacity.num_slots - 1, -1, -1))

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def can_ever_fit(self, prompt_tokens: int, max_tokens: int) -> bool:
        length = prompt_tokens + max_tokens
        return (
            length <= self.capacity.context_length
            and self.pages_for(length - 1) <= self.capacity.num_pages
        )

    def find_prefix(self, request: Request) -> tuple[Node, list[int]]:
        """The longest cached prefix of the prompt: where it ends in the tree, and its pages."""
        if not self.use_prefix_cache:
            return self.cache.root(request.cache_salt), []
        return self.cache.match(request.cache_salt, request.context[: request.max_cached])

    def cached_tokens(self, request: Request) -> int:
        """How much of a waiting request's context is cached; found again only when the cache has
        changed."""
        if request.cached_at != self.cache.version:
            _, pages = self.find_prefix(request)
            request.cached_at = self.cache.version
            request.cached_tokens = len(pages) * self.page_size
        return request.cached_tokens

    @property
    def room(self) -> int:
        """Pages that can be had: free ones, and cached ones that nobody reads."""
        return self.allocator.num_free + self.cache.num_evictable

    def room_without(self, requests: Collection[Request]) -> int:
        """`room`, if these running requests let go of theirs."""
        holding = [request.node for request in requests if request.node is not None]
        for node in holding:
            self.cache.unlock(node)
        room = self.room + sum(len(r.pages) - r.tree_pages for r in requests)
        for node in holding:
            self.cache.lock(node)
        return room

    def admit(self, request: Request, node: Node, pages: list[int]) -> None:
        """Give the request a slot and its cached prefix; the caller has locked `node` for it."""
        request.node, request.pages, request.tree_pages = node, pages, len(pages)
        request.held_tokens = len(pages) * self.page_size
        request.launched_prompt = request.settled_length = request.held_tokens
        if not request.was_retracted:
            request.num_cached = request.settled_length
        request.slot = self.free_slots.pop()
        request.move_to(State.PREFILL)

    def lacking(self, request: Request, length: int) -> int:
        """Pages that the request needs beyond its own to hold `length` tokens."""
        return max(0, self.pages_for(length) - len(request.pages))

    def grow(self, request: Request, length: int) -> list[tuple[int, int, int]]:
        """Give the request pages for `length` tokens; returns the page table writes."""
        count = self.lacking(request, length)
        if count == 0:
            return []
        if count > self.allocator.num_free:
            self.allocator.free(self.cache.evict(count - self.allocator.num_free))
        first = len(request.pages)
        request.pages += self.allocator.allocate(count)
        request.held_tokens = len(request.pages) * self.page_size
        return [(request.slot, i, request.pages[i]) for i in range(first, first + count)]

    def share(self, request: Request) -> None:
        """Put the request's full pages into the prefix cache while it runs, so that others with
        the same prefix need not wait for its end.

        If somebody else has put the same tokens there first, the request keeps its own copies:
        exchanging pages under a launched step is not worth the few that it would save.
        """
        known = min(request.settled_length, len(request.context)) // self.page_size
        if not self.use_prefix_cache or known <= request.tree_pages:
            return
        assert request.node is not None
        first = request.tree_pages
        tokens = request.context[first * self.page_size : known * self.page_size]
        if tuple(tokens[: self.page_size]) in request.node.children:
            return
        node, _ = self.cache.insert(request.node, tokens, request.pages[first:known])
        self.cache.lock(node)
        self.cache.unlock(request.node)
        request.node, request.tree_pages = node, known

    def release(self, request: Request) -> None:
        """Take back slot and pages. What was computed stays in the prefix cache, unless the request
        went wrong: what it computed, or had found there, may be the reason.

        A launched step may still name the request, and write: not into pages that the cache keeps,
        which are full of settled tokens, and into the others before their next owner's step.
        """
        assert request.node is not None, f"{request!r} holds nothing"
        kept = request.tree_pages
        went_wrong = request.finish_reason is FinishReason.ERROR
        if self.use_prefix_cache and not went_wrong:
            tokens = request.prompt + request.output[:-1]
            known = min(request.settled_length, len(tokens)) // self.page_size
            first = request.tree_pages
            new_pages = request.pages[first:known]
            _, existing = self.cache.insert(
                request.node, tokens[first * self.page_size : known * self.page_size], new_pages
            )
            self.allocator.free(new_pages[:existing])
            kept = max(first, known)
        self.allocator.free(request.pages[kept:])
        self.cache.unlock(request.node)
        if went_wrong:
            self.allocator.free(self.cache.cut(request.node))
        self.free_slots.append(request.slot)
        request.pages, request.held_tokens, request.node, request.slot = [], 0, None, -1
        request.branch = None

    def flush_cache(self) -> None:
        """Drop every cached prefix that no request holds."""
        self.allocator.free(self.cache.evict(self.cache.num_evictable))

    def check(self, live: list[Request]) -> None:
        """Assert that every page and slot has exactly one owner."""
        owned = [page for request in live for page in request.pages[request.tree_pages :]]
        cached = [page for node in self.cache for page in node.pages]
        assert all(len(r.pages) * self.page_size == r.held_tokens for r in live)
        pages = sorted([*self.allocator.free_pages, *owned, *cached])
        assert pages == list(range(1, self.capacity.num_pages + 1)), "a page is lost or shared"
        assert len(cached) == self.cache.num_pages
        slots = sorted(self.free_slots + [r.slot for r in live if r.slot >= 0])
        assert slots == list(range(self.capacity.num_slots)), "a slot is lost or shared"
