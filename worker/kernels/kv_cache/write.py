"""Writes the rows of new tokens to the paged cache."""

from __future__ import annotations

from torch import Tensor

from mla_router.worker.kernels.kv_cache.fp8 import as_bytes, to_cache


def kv_write(cache: Tensor, out_cache_loc: Tensor, rows: Tensor) -> None:
    """Sets cache.view(-1, W)[out_cache_loc[i]] = rows[i].

    cache [pages, page_size, W] contiguous; out_cache_loc [T] int64, distinct except for page 0, whose content is never
    read; rows [T, W], converted to the cache's dtype (`fp8.py`, without a scale).
    """
    width = cache.shape[-1]
    assert cache.is_contiguous() and rows.shape == (*out_cache_loc.shape, width), (
        f"cache {tuple(cache.shape)} contiguous {cache.is_contiguous()}, "
        f"out_cache_loc {tuple(out_cache_loc.shape)}, rows {tuple(rows.shape)}"
    )
    stored = as_bytes(to_cache(rows, cache.dtype))
    as_bytes(cache).view(-1, width).index_copy_(0, out_cache_loc, stored)
