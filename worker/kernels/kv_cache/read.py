"""Collects the rows of whole requests from the paged cache, for multi-head prefill."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mla_router.worker.kernels.kv_cache.fp8 import as_bytes


def kv_read(cache: Tensor, page_table: Tensor, requests: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the first `length` rows of each (slot, length) in `requests`, one request after another,
    [sum of lengths, W] in the cache's dtype.

    cache [pages, page_size, W], page_table [slots, P] int32. Slots and lengths are host integers: nothing waits for the
    device.
    """
    page_size = cache.shape[1]
    capacity = page_table.shape[1] * page_size
    assert requests and all(0 < length <= capacity for _, length in requests), (
        f"requests (slot, length) {requests}, page_table {tuple(page_table.shape)} x {page_size}"
    )
    parts = []
    for slot, length in requests:
        pages = page_table[slot, : -(-length // page_size)]
        parts.append(as_bytes(cache).index_select(0, pages).flatten(0, 1)[:length])
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    return rows.view(cache.dtype)
