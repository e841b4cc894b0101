"""The owners of pages and request slots: running requests, the prefix cache, or the free lists.

A request takes pages when a step needs them. Admission and the planner check beforehand that there are enough.
"""

from __future__ import annotations

from collections.abc import Collection

from mla_router.worker.core import Capacity, FinishReason
from mla_router.worker.scheduler.page_allocator import PageAllocator
from mla_router.worker.scheduler.radix_cache import Node, RadixCache
from mla_router.worker.scheduler.request import Request, State


class Memory:
    """Pages and slots of one worker. Each has exactly one owner at any time (`check`)."""

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
        """Returns the longest cached prefix of the request's context: its last node in the tree, and its pages."""
        if not self.use_prefix_cache:
            return self.cache.root(request.cache_salt), []
        return self.cache.match(request.cache_salt, request.context[: request.max_cached])

    def cached_tokens(self, request: Request) -> int:
        """Returns the cached tokens of a waiting request's context. Looks them up again only after a change of the
        cache."""
        if request.cached_at != self.cache.version:
            _, pages = self.find_prefix(request)
            request.cached_at = self.cache.version
            request.cached_tokens = len(pages) * self.page_size
        return request.cached_tokens

    @property
    def room(self) -> int:
        """Available pages: free ones, and cached ones that no request reads."""
        return self.allocator.num_free + self.cache.num_evictable

    def room_without(self, requests: Collection[Request]) -> int:
        """Returns `room` after the retraction of these running requests."""
        nodes = [request.node for request in requests if request.node is not None]
        for node in nodes:
            self.cache.unlock(node)
        room = self.room + sum(len(r.pages) - r.tree_pages for r in requests)
        for node in nodes:
            self.cache.lock(node)
        return room

    def admit(self, request: Request, node: Node, pages: list[int]) -> None:
        """Gives the request a slot and its cached prefix. The caller has locked `node` for it."""
        request.node, request.pages, request.tree_pages = node, pages, len(pages)
        request.allocated_tokens = len(pages) * self.page_size
        request.launched_prompt = request.computed_length = request.allocated_tokens
        if not request.was_retracted:
            request.num_cached = request.computed_length
        request.slot = self.free_slots.pop()
        request.move_to(State.PREFILL)

    def lacking(self, request: Request, length: int) -> int:
        """Returns the number of pages that the request lacks for `length` tokens."""
        return max(0, self.pages_for(length) - len(request.pages))

    def grow(self, request: Request, length: int) -> list[tuple[int, int, int]]:
        """Gives the request pages for `length` tokens. Returns the page table writes (slot, index, page)."""
        count = self.lacking(request, length)
        if count == 0:
            return []
        if count > self.allocator.num_free:
            self.allocator.free(self.cache.evict(count - self.allocator.num_free))
        first = len(request.pages)
        request.pages += self.allocator.allocate(count)
        request.allocated_tokens = len(request.pages) * self.page_size
        return [(request.slot, i, request.pages[i]) for i in range(first, first + count)]

    def share(self, request: Request) -> None:
        """Inserts the full pages of a running request into the prefix cache, so that requests with the same prefix need
        not wait for its end.

        If the cache has the same tokens from another request, the request keeps its own copies: an exchange of pages
        under a launched step is not worth the few pages saved.
        """
        known = min(request.computed_length, len(request.context)) // self.page_size
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
        """Frees the slot and the pages of a request. Its full pages stay in the prefix cache, unless the request failed:
        their values, or those of its cached prefix, may be the cause.

        A launched step may still write to pages of the request. It does not write to those in the cache, which are full
        of computed tokens. It writes to the others before the step of their next owner.
        """
        assert request.node is not None, f"{request!r} has no slot"
        kept = request.tree_pages
        failed = request.finish_reason is FinishReason.ERROR
        if self.use_prefix_cache and not failed:
            tokens = request.prompt + request.output[:-1]
            known = min(request.computed_length, len(tokens)) // self.page_size
            first = request.tree_pages
            new_pages = request.pages[first:known]
            _, existing = self.cache.insert(
                request.node, tokens[first * self.page_size : known * self.page_size], new_pages
            )
            self.allocator.free(new_pages[:existing])
            kept = max(first, known)
        self.allocator.free(request.pages[kept:])
        self.cache.unlock(request.node)
        if failed:
            self.allocator.free(self.cache.cut(request.node))
        self.free_slots.append(request.slot)
        request.pages, request.allocated_tokens, request.node, request.slot = [], 0, None, -1
        request.prefix_pages = None

    def flush_cache(self) -> None:
        """Evicts every cached prefix that no request uses."""
        self.allocator.free(self.cache.evict(self.cache.num_evictable))

    def check(self, live: list[Request]) -> None:
        """Asserts that every page and slot has exactly one owner. `live`: all requests that have not ended."""
        owned = [page for request in live for page in request.pages[request.tree_pages :]]
        cached = [page for node in self.cache for page in node.pages]
        assert all(len(r.pages) * self.page_size == r.allocated_tokens for r in live)
        pages = sorted([*self.allocator.free_pages, *owned, *cached])
        assert pages == list(range(1, self.capacity.num_pages + 1)), "a page is lost or shared"
        assert len(cached) == self.cache.num_pages
        slots = sorted(self.free_slots + [r.slot for r in live if r.slot >= 0])
        assert slots == list(range(self.capacity.num_slots)), "a slot is lost or shared"
