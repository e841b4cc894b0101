"""Attention of one new token per request over paged keys and values, several query heads to each
key head: grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245).

Multi-head and multi-query attention are its cases of one query head a key head, and of one key head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.paged_rows import paged_rows


def gqa_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    *,
    max_length: int,
    scale: float,
) -> Tensor:
    """softmax(q . keys * scale) . values for each query head over its request's cached tokens.

    q [B, H, D]; keys and values [pages, page_size, G, D] with H a multiple of G: query heads
    i * H / G and those after it share key head i; page_table [all slots, P] int32; slots [B] int64:
    each row's line in page_table; lengths [B] int32: tokens to attend to, at least 1 and at most
    max_length. The result is [B, H, D] in q's dtype; the arithmetic is float32.
    """
    batch, heads, width = q.shape
    _, page_size, groups, _ = keys.shape
    assert keys.shape == values.shape and keys.shape[-1] == width and heads % groups == 0, (
        f"q {tuple(q.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
    )
    assert slots.shape == (batch,), f"q {tuple(q.shape)}, slots {tuple(slots.shape)}"
    locations, beyond = paged_rows(
        page_table, slots, lengths, page_size=page_size, max_length=max_length
    )

    def gathered(cache: Tensor) -> Tensor:  # [B, G, max_length, D]
        rows = cache.flatten(0, 1).index_select(0, locations.flatten())
        return rows.view(batch, max_length, groups, width).transpose(1, 2).float()

    grouped = q.view(batch, groups, heads // groups, width).float()
    scores = torch.matmul(grouped, gathered(keys).transpose(-1, -2)) * scale
    probabilities = scores.masked_fill_(beyond[:, None, None], float("-inf")).softmax(dim=-1)
    return torch.matmul(probabilities, gathered(values)).view(batch, heads, width).to(q.dtype)
