"""The memory of the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mla_router.worker.kv_cache.spec import KVCacheSpec, own_window


class KVCachePool:
    """One tensor for each layer. Page p of the page table is page p of every layer, so the page table, the page allocator
    and the prefix cache handle pages only.

    Where layers with a window have pages of their own, one such layer and one other share a tensor: a page belongs to
    either kind of layers (`own_window`).
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        num_pages: int,
        page_size: int,
        device: torch.device,
        *,
        own_windows: bool = False,
        tree_pages: int = 0,
    ) -> None:
        """Allocates `num_pages` usable pages, numbered from 1, and page 0, which no request owns: unused entries of the
        page table point to it. `own_windows`: layers with a window have pages of their own. `tree_pages`: further ones
        after those of requests (`Capacity.tree_pages`)."""
        self.specs = tuple(specs)
        self.num_pages = num_pages
        self.page_size = page_size

        def zeros(spec: KVCacheSpec) -> torch.Tensor:
            shape = num_pages + 1 + tree_pages, page_size, spec.width
            return torch.zeros(shape, dtype=spec.dtype, device=device)

        assert not own_windows or own_window(self.specs) is not None, f"{self.specs}"
        owners = [spec for spec in self.specs if not own_windows or spec.window is None]
        self.tensors = [zeros(spec) for spec in owners]
        others = iter(self.tensors)
        windowed = iter(self.tensors) if own_windows else others
        # By layer: [num_pages + 1 + tree_pages, page_size, width]
        self.layers = tuple(
            next(others if spec.window is None else windowed) for spec in self.specs
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)
