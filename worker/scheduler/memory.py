"""The owners of pages and request slots: running requests, the prefix cache, or the free lists.

A request takes pages when a step needs them. Admission and the planner check beforehand that there are enough.
"""

from __future__ import annotations

from collections.abc import Collection

from mla_router.worker.generation import FinishReason
from mla_router.worker.scheduler.page_allocator import PageAllocator
from mla_router.worker.scheduler.place import Place
from mla_router.worker.scheduler.radix_cache import Node, RadixCache
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.scheduler.window_pages import WindowPages
from mla_router.worker.step.engine import Capacity


class Memory:
    """Pages and slots of one worker. Each has exactly one owner at any time (`check`)."""

    def __init__(self, capacity: Capacity, *, use_prefix_cache: bool) -> None:
        self.capacity = capacity
        self.page_size = capacity.page_size
        self.allocator = PageAllocator(capacity.num_pages)
        window = capacity.window
        self.windows = None if window is None else WindowPages(capacity, window)
        self.cache = RadixCache(capacity.page_size, self.windows)
        self.use_prefix_cache = use_prefix_cache
        self.free_slots = list(range(capacity.num_slots - 1, -1, -1))

    def pages_for(self, tokens: int) -> int:
        """Returns the pages of a request of `tokens` tokens. Where layers have window pages, each page has
        one: a chunk needs its window pages until it is computed, and they become spare later."""
        return -(-tokens // self.page_size) * self.capacity.page_kinds

    def can_ever_fit(self, prompt_tokens: int, max_tokens: int) -> bool:
        length = prompt_tokens + max_tokens
        return (
            length <= self.capacity.context_length
            and self.pages_for(length - 1) <= self.capacity.num_pages
        )

    def find_prefix(self, request: Request) -> tuple[Node, list[int]]:
        """Returns the longest cached prefix of the request's context: its last node in the tree, and its pages."""
        if not self.use_prefix_cache:
            return self.cache.root(request.message.cache_salt), []
        salt, context = request.message.cache_salt, request.context[: request.max_cached]
        node, pages = self.cache.match(salt, context)
        if self.windows is not None and (usable := self.windows.usable(pages)) < len(pages):
            return self.cache.match(salt, context[: usable * self.page_size])
        return node, pages

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
        """Available pages: free ones, cached ones that no request reads, and spare window pages."""
        spare = 0 if self.windows is None else self.windows.num_spare
        return self.allocator.num_free + self.cache.num_evictable + spare

    def room_without(self, requests: Collection[Request]) -> int:
        """Returns `room` after the retraction of these running requests, without the window pages that they alone read of
        a prefix that others have locked."""
        places = [request.place for request in requests]
        nodes = [place.node for place in places if place.node is not None]
        for node in nodes:
            self.cache.unlock(node)
        room = self.room + sum(len(place.pages) - place.tree_pages for place in places)
        if self.windows is not None:
            owned = (page for place in places for page in place.pages[place.tree_pages :])
            room += self.windows.count(owned, spare=False)
        for node in nodes:
            self.cache.lock(node)
        return room

    def admit(self, request: Request, node: Node, pages: list[int]) -> None:
        """Gives the request a slot and its cached prefix. The caller has locked `node` for it."""
        cached = len(pages) * self.page_size
        place = Place(self.free_slots.pop(), pages, cached, len(pages), node)
        if self.windows is not None:
            place.first_read = self.windows.first_read(cached)
            self.windows.read(pages[place.first_read :])
        request.place = place
        request.launched_prompt = request.computed_length = cached
        if not request.was_retracted:
            request.num_cached = cached
        request.move_to(State.PREFILL)

    def prefix_writes(self, request: Request) -> list[tuple[int, int, int]]:
        """Returns the page table writes (slot, index, page) of the cached prefix of an admitted request."""
        return self._writes(request.place, 0)

    def lacking(self, request: Request, length: int) -> int:
        """Returns the number of pages that the request lacks for `length` tokens."""
        return max(0, self.pages_for(length) - len(request.place.pages) * self.capacity.page_kinds)

    def taken_by_prefix(self, pages: list[int]) -> int:
        """Returns the number of window pages that a request with the cached prefix `pages` will read, and nobody reads
        now."""
        if self.windows is None:
            return 0
        first = self.windows.first_read(len(pages) * self.page_size)
        return self.windows.count_unread(pages[first:])

    def grow(self, request: Request, length: int) -> list[tuple[int, int, int]]:
        """Gives the request pages for `length` tokens. Returns the page table writes (slot, index, page)."""
        count = self.lacking(request, length)
        if count == 0:
            return []
        if count > self.allocator.num_free:
            self._make_room(count)
        place = request.place
        first = len(place.pages)
        new = self.allocator.allocate(count)
        if self.windows is not None:
            own = new[count // 2 :]
            del new[count // 2 :]
            self.windows.give(new, own)
        place.pages += new
        place.allocated_tokens = len(place.pages) * self.page_size
        return self._writes(place, first)

    def leave_window(self, request: Request) -> None:
        """Leaves the window pages that a running request does not read any more."""
        assert self.windows is not None
        place, first = request.place, self.windows.first_read(request.computed_length)
        if first > place.first_read:
            self.windows.leave(place.pages[place.first_read : first])
            place.first_read = first

    def share(self, request: Request) -> None:
        """Inserts the full pages of a running request into the prefix cache, so that requests with the same prefix need
        not wait for its end.

        If the cache has the same tokens from another request, the request keeps its own copies: an exchange of pages
        under a launched step is not worth the few pages saved.
        """
        place, first = request.place, request.place.tree_pages
        known = min(request.computed_length, len(request.context)) // self.page_size
        if not self.use_prefix_cache or known <= first:
            return
        assert place.node is not None
        tokens = request.context[first * self.page_size : known * self.page_size]
        if tuple(tokens[: self.page_size]) in place.node.children:
            return
        node, _ = self.cache.insert(place.node, tokens, place.pages[first:known])
        self.cache.lock(node)
        self.cache.unlock(place.node)
        place.node, place.tree_pages = node, known

    def release(self, request: Request) -> None:
        """Frees the slot and the pages of a request. Its full pages stay in the prefix cache, unless the request failed:
        their values, or those of its cached prefix, may be the cause.

        A launched step may still write to pages of the request. It does not write to those in the cache, which are full
        of computed tokens. It writes to the others before the step of their next owner.
        """
        place, request.place = request.place, Place()
        assert place.node is not None, f"{request!r} has no slot"
        kept = place.tree_pages
        if self.windows is not None:
            self.windows.leave(place.pages[place.first_read :])
        failed = request.finish_reason is FinishReason.ERROR
        if self.use_prefix_cache and not failed:
            tokens = request.prompt + request.output[:-1]
            known = min(request.computed_length, len(tokens)) // self.page_size
            first = place.tree_pages
            new_pages = place.pages[first:known]
            _, existing = self.cache.insert(
                place.node, tokens[first * self.page_size : known * self.page_size], new_pages
            )
            self._free(new_pages[:existing])
            kept = max(first, known)
        self._free(place.pages[kept:])
        self.cache.unlock(place.node)
        if failed:
            self._free(self.cache.cut(place.node))
        self.free_slots.append(place.slot)

    def flush_cache(self) -> None:
        """Evicts every cached prefix that no request uses."""
        self._free(self.cache.evict(self.cache.num_evictable))

    def _make_room(self, count: int) -> None:
        """Frees pages until `count` are free: spare window pages first, since they help fewer requests than the end of a
        cached prefix."""
        while (missing := count - self.allocator.num_free) > 0:
            if self.windows is not None and self.windows.num_spare:
                self.cache.version += 1
                self.allocator.free(self.windows.reclaim(missing))
            else:
                evicted = self.cache.evict(-(-missing // self.capacity.page_kinds))
                assert evicted, f"{missing} pages are missing"
                self._free(evicted)

    def _free(self, pages: list[int]) -> None:
        if self.windows is not None:
            self.allocator.free(self.windows.take(pages))
        self.allocator.free(pages)

    def _writes(self, place: Place, first: int) -> list[tuple[int, int, int]]:
        """Returns the page table writes (slot, index, page) of pages from `first` on, and of the window pages among theirs
        that the request reads."""
        slot, pages = place.slot, place.pages
        writes = [(slot, i, pages[i]) for i in range(first, len(pages))]
        if self.windows is not None:
            first = max(first, place.first_read)
            own = self.windows.of(pages[first:])
            offset = self.capacity.pages_per_request + first
            writes += [(slot, offset + i, page) for i, page in enumerate(own)]
        return writes

    def check(self, live: list[Request]) -> None:
        """Asserts that every page and slot has exactly one owner. `live`: all requests that have not ended."""
        places = [request.place for request in live]
        owned = [page for place in places for page in place.pages[place.tree_pages :]]
        cached = [page for node in self.cache for page in node.pages]
        assert all(len(p.pages) * self.page_size == p.allocated_tokens for p in places)
        own: list[int] = []
        if self.windows is not None:
            locked = [page for node in self.cache if node.locks for page in node.pages]
            evictable = [page for node in self.cache if not node.locks for page in node.pages]
            self.windows.check(owned, locked, evictable)
            assert self.cache.num_evictable == len(evictable) + self.windows.count(evictable)
            own = [page for page in self.windows.of([*owned, *cached]) if page]
        pages = sorted([*self.allocator.free_pages, *owned, *cached, *own])
        assert pages == list(range(1, self.capacity.num_pages + 1)), "a page is lost or shared"
        assert len(cached) == self.cache.num_pages
        slots = sorted(self.free_slots + [place.slot for place in places if place.slot >= 0])
        assert slots == list(range(self.capacity.num_slots)), "a slot is lost or shared"
