"""Trees of drafts of several slots, and their cached rows behind the pages of requests."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_router.worker.kernels.attention.tree_tail import TreeTail
from mla_router.worker.kernels.kv_cache.fp8 import as_bytes


def random_tails(slots: int, queries: int, keys: int, draw: random.Random) -> Tensor:
    """Returns the visible keys of the rows of trees: itself and its ancestors. Some rows are idle."""
    rows = []
    for _ in range(slots):
        masks = [1]
        for node in range(1, keys):
            masks.append(masks[draw.randrange(node)] | 1 << node)
        own = masks if queries == keys else draw.sample(masks, queries)
        rows += [0 if draw.random() < 0.2 else mask for mask in own]
    return torch.tensor([row - (1 << 64) if row >> 63 else row for row in rows])


@dataclass(frozen=True)
class CachedTrees:
    """Rows without an owner, and keys that no row sees, are NaN."""

    cache: Tensor  # [pages, page_size, width]
    page_table: Tensor  # [S, P] int32
    lengths: Tensor  # [S] int32, of the tokens in front of the trees
    tail: TreeTail

    def seen(self, row: int) -> Tensor:
        """Returns the cached rows to which a row attends, [n, width]."""
        page_size, slot = self.cache.shape[1], row // self.tail.queries
        positions = torch.arange(int(self.lengths[slot]), device=self.cache.device)
        pages = self.page_table[slot, positions // page_size]
        mask = int(self.tail.visible[row])
        first = self.tail.first_row + slot * self.tail.keys
        nodes = [first + key for key in range(self.tail.keys) if mask >> key & 1]
        at = torch.cat((pages * page_size + positions % page_size, pages.new_tensor(nodes)))
        found = as_bytes(self.cache).flatten(0, 1)[at.long()]
        return found.view(self.cache.dtype)


def cached_trees(
    lengths: list[int],
    queries: int,
    keys: int,
    width: int,
    *,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> CachedTrees:
    draw, generator = random.Random(len(lengths)), torch.Generator().manual_seed(3)
    own = [-(-length // page_size) for length in lengths]
    count, behind = len(lengths), 1 + sum(own)
    first_row, pages = behind * page_size, behind + -(-len(lengths) * keys // page_size)
    flat = torch.full((pages * page_size, width), float("nan"))
    table, at = torch.zeros(count, max(own), dtype=torch.int32), 1
    visible = random_tails(count, queries, keys, draw)
    for slot, (length, taken) in enumerate(zip(lengths, own, strict=True)):
        table[slot, :taken] = torch.arange(at, at + taken)
        first = at * page_size
        flat[first : first + length] = torch.randn(length, width, generator=generator)
        at += taken
        for key in range(keys):
            if any(mask >> key & 1 for mask in visible[slot * queries :][:queries].tolist()):
                flat[first_row + slot * keys + key] = torch.randn(width, generator=generator)
    return CachedTrees(
        flat.to(dtype).view(pages, page_size, width).to(device),
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        TreeTail(visible.to(device), queries, keys, first_row),
    )
