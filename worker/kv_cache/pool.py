"""The memory of the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mla_router.worker.kv_cache.spec import KVCacheSpec


class KVCachePool:
    """One tensor for each layer. Page p of the page table is page p of every layer, so the page table, the page allocator
    and the prefix cache handle pages only."""

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        num_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        """Allocates `num_pages` usable pages, numbered from 1, and page 0, which no request owns: unused entries of the
        page table point to it."""
        self.specs = tuple(specs)
        self.num_pages = num_pages
        self.page_size = page_size
        # By layer: [num_pages + 1, page_size, width]
        self.layers = tuple(
            torch.zeros(num_pages + 1, page_size, spec.width, dtype=spec.dtype, device=device)
            for spec in self.specs
        )

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)
