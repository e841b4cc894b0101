"""Collects cached rows of several requests for multi-head prefill, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.kv_cache.fp8 import (
    UNSCALED,
    KVScales,
    as_bytes,
    is_fp8,
    rows_from_cache,
)

BLOCK_ROWS = 64
BLOCK_WIDTH = 64
BLOCK_REQUESTS = 64
MAX_COLUMNS = 1024  # columns that one program copies


def kv_gather(
    cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    first_rows: Tensor,
    starts: Tensor,
    total: int,
    *,
    dtype: torch.dtype | None = None,
    scales: KVScales = UNSCALED,
    value_column: int = 0,
) -> Tensor:
    """Returns rows [first_rows[i], first_rows[i] + starts[i + 1] - starts[i]) of each request i, one request after
    another, [total, W] in `dtype`, by default the cache's. Rows of an FP8 cache are multiplied by `scales` (`fp8.py`),
    values from `value_column` on.

    cache [pages, page_size, W] contiguous; page_table [all slots, P] int32; slots [C] int64 or int32:
    each request's line in page_table; first_rows [C] int32; starts [C + 1] int32, from 0 to `total`: the first row of
    each request in the result.
    """
    assert cache.is_contiguous() and page_table.stride(-1) == 1, (
        f"cache {tuple(cache.shape)} contiguous {cache.is_contiguous()}, "
        f"page_table {page_table.stride()}"
    )
    assert slots.shape == first_rows.shape and starts.shape[0] == slots.shape[0] + 1, (
        f"slots {tuple(slots.shape)}, first rows {tuple(first_rows.shape)}, "
        f"starts {tuple(starts.shape)}"
    )
    gather = kv_gather_triton if on_gpu(cache, dtype) else kv_gather_torch
    return gather(
        cache,
        page_table,
        slots,
        first_rows,
        starts,
        total,
        dtype=dtype,
        scales=scales,
        value_column=value_column,
    )


def kv_take(
    cache: Tensor,
    locations: Tensor,
    *,
    dtype: torch.dtype,
    scales: KVScales = UNSCALED,
    value_column: int = 0,
) -> Tensor:
    """Returns the rows at `locations` [N] int64 of the flattened cache, [N, W] in `dtype`, as `kv_gather`. In torch
    operations, for short prompts."""
    taken = as_bytes(cache).flatten(0, 1).index_select(0, locations).view(cache.dtype)
    return rows_from_cache(taken, dtype, scales, value_column)


def kv_gather_torch(
    cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    first_rows: Tensor,
    starts: Tensor,
    total: int,
    *,
    dtype: torch.dtype | None = None,
    scales: KVScales = UNSCALED,
    value_column: int = 0,
) -> Tensor:
    page_size = cache.shape[1]
    rows = torch.arange(total, dtype=torch.int32, device=cache.device)
    request = torch.searchsorted(starts[1:], rows, right=True)
    position = rows - starts[request] + first_rows[request]
    page = page_table[slots[request], position // page_size].long()
    return kv_take(
        cache,
        page * page_size + position % page_size,
        dtype=dtype or cache.dtype,
        scales=scales,
        value_column=value_column,
    )


@triton.jit(do_not_specialize=["num_requests", "total", "key_scale", "value_scale"])
def _kv_gather(
    cache_ptr,
    page_table_ptr,
    slots_ptr,
    first_rows_ptr,
    starts_ptr,
    out_ptr,
    num_requests,
    total,
    page_table_stride,
    key_scale,
    value_scale,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_COLUMN: tl.constexpr,
    SCALED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < total
    # The request of a row is the number of requests that end before it
    request = tl.zeros([BLOCK_ROWS], tl.int32)
    for begin in range(0, num_requests, BLOCK_REQUESTS):
        i = begin + tl.arange(0, BLOCK_REQUESTS)
        ends = tl.load(starts_ptr + 1 + i, mask=i < num_requests, other=2147483647)
        request += tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), 1)
    slot = tl.load(slots_ptr + request, mask=is_row, other=0).to(tl.int64)
    start = tl.load(starts_ptr + request, mask=is_row, other=0)
    position = tl.load(first_rows_ptr + request, mask=is_row, other=0) + rows - start
    pages = page_table_ptr + slot * page_table_stride + position // PAGE_SIZE
    page = tl.load(pages, mask=is_row, other=0).to(tl.int64)
    source = cache_ptr + (page * PAGE_SIZE + position % PAGE_SIZE) * WIDTH
    target = out_ptr + rows.to(tl.int64) * WIDTH
    first_column = tl.program_id(1) * COLUMNS
    for column in tl.static_range(0, COLUMNS, BLOCK_WIDTH):
        columns = first_column + column + tl.arange(0, BLOCK_WIDTH)
        mask = is_row[:, None] & (columns < WIDTH)[None, :]
        tile = tl.load(source[:, None] + columns[None, :], mask=mask)
        if SCALED:
            scale = tl.where(columns < VALUE_COLUMN, key_scale, value_scale)
            tile = (tile.to(tl.float32) * scale[None, :]).to(out_ptr.dtype.element_ty)
        tl.store(target[:, None] + columns[None, :], tile, mask=mask)


def kv_gather_triton(
    cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    first_rows: Tensor,
    starts: Tensor,
    total: int,
    *,
    dtype: torch.dtype | None = None,
    scales: KVScales = UNSCALED,
    value_column: int = 0,
) -> Tensor:
    page_size, width = cache.shape[1:]
    out = cache.new_empty(total, width, dtype=dtype)
    columns = min(width, MAX_COLUMNS)
    _kv_gather[(triton.cdiv(total, BLOCK_ROWS), triton.cdiv(width, columns))](
        cache,
        page_table,
        slots,
        first_rows,
        starts,
        out,
        slots.shape[0],
        total,
        page_table.stride(0),
        scales.keys,
        scales.values,
        PAGE_SIZE=page_size,
        WIDTH=width,
        VALUE_COLUMN=value_column,
        SCALED=is_fp8(cache.dtype),
        COLUMNS=columns,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_WIDTH=BLOCK_WIDTH,
        BLOCK_REQUESTS=BLOCK_REQUESTS,
    )
    return out
