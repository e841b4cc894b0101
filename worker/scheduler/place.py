"""The place of a running request: its slot on the device, and its pages of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from mla_router.worker.scheduler.radix_cache import Node


@dataclass(slots=True, eq=False)
class Place:
    """A request without a place has an empty one. `Memory` alone changes it."""

    slot: int = -1
    pages: list[int] = field(default_factory=list)
    allocated_tokens: int = 0  # capacity of the pages
    tree_pages: int = 0  # leading pages that belong to the prefix cache
    node: Node | None = None  # the last node of the tree pages, locked for the request
    first_read: int = 0  # index of the first page whose window page it reads (`window_pages.py`)
    _prefix_key: tuple[int, ...] | None = None

    def prefix_key(self) -> tuple[int, ...]:
        """Returns a sort key by which requests with common first pages are adjacent: the pages 0, 1, 3, 7 and so on."""
        if self._prefix_key is None:
            self._prefix_key = tuple(
                [self.pages[(1 << k) - 1] for k in range(len(self.pages).bit_length())]
            )
        return self._prefix_key
