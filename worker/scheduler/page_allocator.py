"""Allocates pages of the KV cache, as integers on the host.

A free list in device memory would need a kernel launch for every allocation and a fence for every release. Page 0 is
never allocated: padding rows, which no request reads, are written there.
"""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Allocates pages 1 .. num_pages, the most recently freed first (it may still be in the device's cache)."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, f"{num_pages=}"
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_pages(self) -> tuple[int, ...]:
        return tuple(self._free)

    def allocate(self, count: int) -> list[int]:
        assert 0 <= count <= len(self._free), f"{count=} free={len(self._free)}"
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        return pages

    def free(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)
        assert len(self._free) <= self.num_pages, f"{len(self._free)=} of {self.num_pages}"
