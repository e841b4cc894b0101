"""Collects the rows of requests from the paged cache, for multi-head prefill."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mla_router.worker.kernels.kv_cache.fp8 import as_bytes


def kv_read(cache: Tensor, page_table: Tensor, requests: Sequence[tuple[int, int, int]]) -> Tensor:
    """Returns the rows from `first` to before `end` of each (slot, first, end) in `requests`, one request after another,
    [S, W] in the cache's dtype.

    cache [pages, page_size, W], page_table [slots, P] int32. Requests are host integers: nothing waits for the device.
    """
    page_size = cache.shape[1]
    capacity = page_table.shape[1] * page_size
    assert requests and all(0 <= first < end <= capacity for _, first, end in requests), (
        f"requests (slot, first, end) {requests}, page_table {tuple(page_table.shape)} x {page_size}"
    )
    parts = []
    for slot, first, end in requests:
        skipped = first // page_size
        pages = page_table[slot, skipped : -(-end // page_size)]
        rows = as_bytes(cache).index_select(0, pages).flatten(0, 1)
        parts.append(rows[first - skipped * page_size : end - skipped * page_size])
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    return rows.view(cache.dtype)
