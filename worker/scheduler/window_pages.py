"""Window pages: the pages of layers with a sliding window, where these have pages of their own (`kv_cache/spec.py`).

A page holds some tokens in the layers that attend to all tokens, and its window page holds them in the others. A request
reads the window pages of its last tokens. Older ones are spare: a prompt that branches off there finds its prefix with
them, until their memory is needed. A prefix is of use only with the window pages of its last tokens.

Methods take pages. Pages and window pages are numbers of one allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mla_router.worker.step.engine import Capacity


class WindowPages:
    """The window page of each page, and its readers: running requests."""

    def __init__(self, capacity: Capacity, window: int) -> None:
        self._page_size = capacity.page_size
        self._window = window
        # Window pages that the first token of a page reads before it
        self._most_read = -(-(window - 1) // capacity.page_size)
        # By page: its window page, or 0, and the number of its readers
        self._of = [0] * (capacity.num_pages + 1)
        self._readers = [0] * (capacity.num_pages + 1)
        # Pages, oldest first, whose window page has no reader. Those of evictable nodes are not among them: they are
        # evicted with their page
        self._spare: dict[int, None] = {}

    @property
    def num_spare(self) -> int:
        return len(self._spare)

    def first_read(self, length: int) -> int:
        """Returns the index of the first page that a request reads after `length` tokens."""
        return max(0, length + 1 - self._window) // self._page_size

    def usable(self, pages: Sequence[int]) -> int:
        """Returns how many leading `pages` of a prompt have the window pages that the next token reads."""
        usable = run = 0
        for count, page in enumerate(pages, 1):
            run = run + 1 if self._of[page] else 0
            if run >= min(count, self._most_read):
                usable = count
        return usable

    def of(self, pages: Iterable[int]) -> list[int]:
        return [self._of[page] for page in pages]

    def count(self, pages: Iterable[int], *, spare: bool = True) -> int:
        """Returns how many of `pages` have a window page, with or without spare ones."""
        return sum(1 for p in pages if self._of[p] and (spare or p not in self._spare))

    def count_unread(self, pages: Iterable[int]) -> int:
        return sum(1 for page in pages if not self._readers[page])

    def give(self, pages: Sequence[int], window_pages: Sequence[int]) -> None:
        """Gives new pages of a request their window pages. The request reads them."""
        for page, window_page in zip(pages, window_pages, strict=True):
            assert not self._of[page] and not self._readers[page], f"{page=} has another owner"
            self._of[page], self._readers[page] = window_page, 1

    def read(self, pages: Iterable[int]) -> None:
        """Adds a reader."""
        for page in pages:
            assert self._of[page], f"{page=} has no window page"
            self._readers[page] += 1
            self._spare.pop(page, None)

    def leave(self, pages: Iterable[int]) -> None:
        """Removes a reader. The pages are a request's, or in a locked node."""
        for page in pages:
            self._readers[page] -= 1
            if not self._readers[page]:
                self._spare[page] = None

    def lock(self, pages: Iterable[int]) -> None:
        """Makes window pages without a reader spare: the pages cannot be evicted any more."""
        for page in pages:
            if self._of[page] and not self._readers[page]:
                self._spare[page] = None

    def unlock(self, pages: Iterable[int]) -> None:
        """Leaves window pages to their pages, which can be evicted now."""
        for page in pages:
            self._spare.pop(page, None)

    def reclaim(self, most: int) -> list[int]:
        """Takes up to `most` spare window pages from their pages, the oldest first, and returns them."""
        taken = list(self._spare)[:most]
        return self.take(taken)

    def take(self, pages: Iterable[int]) -> list[int]:
        """Returns the window pages of `pages`, which have none any more."""
        taken = []
        for page in pages:
            if self._of[page]:
                assert not self._readers[page], f"{page=} is read"
                self._spare.pop(page, None)
                taken.append(self._of[page])
                self._of[page] = 0
        return taken

    def check(self, owned: Sequence[int], locked: Sequence[int], evictable: Sequence[int]) -> None:
        """Asserts that spare and read window pages are those of pages of requests or in locked nodes."""
        kept = {page for page in (*owned, *locked) if self._of[page]}
        read = {page for page, readers in enumerate(self._readers) if readers}
        assert not any(self._readers[page] for page in evictable), "an evictable page is read"
        assert read | set(self._spare) == kept, f"{read=} {self._spare=} {kept=}"
        assert not read & set(self._spare), "a spare page is read"
