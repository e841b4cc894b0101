"""The cache rows of decoding requests, one request a line."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_rows(
    page_table: Tensor, slots: Tensor, lengths: Tensor, *, page_size: int, max_length: int
) -> tuple[Tensor, Tensor]:
    """Returns the locations of each request's rows in cache.view(-1, W), [B, max_length] int32, and whether they are
    beyond its length, [B, max_length] bool.

    page_table [all slots, P] int32; slots [B] int64: each request's line in page_table; lengths [B] int32,
    at least 1 and at most max_length.

    Rows beyond a request's length belong to another request or to none. Their probability would be 0, but 0 * NaN
    would spread from one request to another. So their location is the request's first row.
    """
    assert slots.shape == lengths.shape, (
        f"slots {tuple(slots.shape)}, lengths {tuple(lengths.shape)}"
    )
    num_pages = -(-max_length // page_size)
    assert 0 < num_pages <= page_table.shape[1], (
        f"max_length {max_length}, page_table {tuple(page_table.shape)} x {page_size}"
    )
    pages = page_table[:, :num_pages].index_select(0, slots)
    within_page = torch.arange(page_size, dtype=torch.int32, device=page_table.device)
    locations = (pages[:, :, None] * page_size + within_page).view(len(slots), -1)[:, :max_length]
    beyond = torch.arange(max_length, dtype=torch.int32, device=lengths.device) >= lengths[:, None]
    return torch.where(beyond, locations[:, :1], locations), beyond
