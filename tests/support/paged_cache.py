"""A paged KV cache of some requests, and attention over it in float64, by its formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_router.worker.kernels.kv_cache.fp8 import as_bytes


@dataclass(frozen=True)
class PagedCache:
    cache: Tensor  # [pages, page_size, width], NaN where no request's rows are
    page_table: Tensor  # [all slots, P] int32, 0 beyond a request's pages
    slots: Tensor  # [R] int64
    lengths: Tensor  # [R] int32
    rows: list[Tensor]  # each request's [length, width]

    def first(self, requests: int) -> PagedCache:
        """Returns the cache with the first `requests` requests only."""
        return replace(self, rows=self.rows[:requests])

    def share(self, requests: range, pages: int) -> None:
        """Gives the requests the first `pages` pages of the first of them. Each must be long enough."""
        head, page_size = requests[0], self.cache.shape[1]
        for other in requests[1:]:
            self.page_table[self.slots[other], :pages] = self.page_table[self.slots[head], :pages]
            self.rows[other][: pages * page_size] = self.rows[head][: pages * page_size]

    def idle_slot(self) -> int:
        """Returns a slot without a request, whose pages are set to page 0, as for padding."""
        taken = self.slots.tolist()
        idle = next(slot for slot in range(len(self.page_table)) if slot not in taken)
        self.page_table[idle] = 0
        return idle


def random_cache(
    lengths: list[int],
    page_size: int,
    width: int,
    *,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: str = "cpu",
) -> PagedCache:
    """Returns a cache with pages and slots in random order. `generator` must be on `device`."""

    def permutation(n: int) -> Tensor:
        return torch.randperm(n, generator=generator, device=device)

    per_slot = -(-max(lengths) // page_size)
    num_slots = len(lengths) + 2
    page_table = permutation(num_slots * per_slot).int().view(num_slots, per_slot) + 1
    slots = permutation(num_slots)[: len(lengths)]
    cache = torch.full(
        (num_slots * per_slot + 1, page_size, width), float("nan"), device=device
    ).to(dtype)
    all_rows = []
    for slot, length in zip(slots.tolist(), lengths, strict=True):
        rows = torch.randn(length, width, generator=generator, device=device).to(dtype)
        at = torch.arange(length, device=device)
        page = page_table[slot, at // page_size].long()
        as_bytes(cache)[page, at % page_size] = as_bytes(rows)
        page_table[slot, -(-length // page_size) :] = 0
        all_rows.append(rows)
    lengths_there = torch.tensor(lengths, dtype=torch.int32, device=device)
    return PagedCache(cache, page_table, slots, lengths_there, all_rows)


def forget_rows_before(paged: PagedCache, window: int) -> None:
    """Sets the rows before each request's last `window` ones to NaN: their memory may belong to another request."""
    page_size = paged.cache.shape[1]
    for slot, length in zip(paged.slots.tolist(), paged.lengths.tolist(), strict=True):
        at = torch.arange(max(length - window, 0), device=paged.cache.device)
        page = paged.page_table[slot, at // page_size].long()
        paged.cache[page, at % page_size] = float("nan")


def dequantized(paged: PagedCache, keys: float, values: float = 1.0, column: int = 0) -> PagedCache:
    """Returns the requests of an FP8 cache with rows in float64: numbers before `column` times `keys`, if it is not 0,
    the others times `values`. If it is 0, all are times `keys`."""
    rows = []
    for stored in paged.rows:
        scales = torch.full((stored.shape[1],), values, dtype=torch.float64, device=stored.device)
        scales[: column or None] = keys
        rows.append(stored.double() * scales)
    return replace(paged, rows=rows)


def expected_attention(
    q: Tensor, paged: PagedCache, latent: int, scale: float, queries: int
) -> Tensor:
    """Returns [B, H, latent] float64 for q [B, H, width], B = requests x queries."""
    out = torch.empty(*q.shape[:2], latent, dtype=torch.float64, device=q.device)
    for request, rows in enumerate(paged.rows):
        for i in range(queries):
            row = request * queries + i
            visible = rows[: len(rows) - queries + 1 + i].double()
            weights = (q[row].double() @ visible.T * scale).softmax(dim=-1)
            out[row] = weights @ visible[:, :latent]
    return out


def expected_gqa(
    q: Tensor,
    paged: PagedCache,
    groups: int,
    v_head_dim: int,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Returns [R, H, v_head_dim] float64 for q [R, H, width]. A row has the keys of all groups, then the
    values. Queries attend to the last `window` rows."""
    width, share = q.shape[-1], q.shape[1] // groups
    out = torch.empty(*q.shape[:2], v_head_dim, dtype=torch.float64, device=q.device)
    for request, rows in enumerate(paged.rows):
        for head in range(q.shape[1]):
            key_at = head // share * width
            value_at = groups * width + head // share * v_head_dim
            seen = rows[-window:] if window else rows
            scores = seen[:, key_at : key_at + width].double() @ q[request, head].double() * scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            weights = scores.softmax(dim=0)
            out[request, head] = weights @ seen[:, value_at : value_at + v_head_dim].double()
    return out
