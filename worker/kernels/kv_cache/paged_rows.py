"""The cache rows of decoding requests, one request a line."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_rows(
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    *,
    page_size: int,
    max_length: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the locations of each request's last rows in cache.view(-1, W), [B, N] int32, and whether they are beyond
    its length, [B, N] bool. N is max_length, or `window` if that is less.

    page_table [all slots, P] int32; slots [B] int64: each request's line in page_table; lengths [B] int32,
    at least 1 and at most max_length.

    Rows beyond a request's length belong to another request or to none. Their probability would be 0, but 0 * NaN
    would spread from one request to another. So their location is the request's first row of the N.
    """
    assert slots.shape == lengths.shape, (
        f"slots {tuple(slots.shape)}, lengths {tuple(lengths.shape)}"
    )
    num_pages = -(-max_length // page_size)
    assert 0 < num_pages <= page_table.shape[1], (
        f"max_length {max_length}, page_table {tuple(page_table.shape)} x {page_size}"
    )
    rows = min(max_length, window or max_length)
    first = (lengths - rows).clamp(min=0)[:, None]
    positions = first + torch.arange(rows, dtype=torch.int32, device=lengths.device)
    beyond = positions >= lengths[:, None]
    positions = torch.where(beyond, first, positions)
    pages = page_table.index_select(0, slots).gather(1, (positions // page_size).long())
    return pages * page_size + positions % page_size, beyond
