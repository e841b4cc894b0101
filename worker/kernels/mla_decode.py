"""Attention of one new token per request over the paged latent cache, in MLA's absorbed form.

DeepSeek-V2 (arXiv:2405.04434, section 2.1): with the key up-projection absorbed into the query and
the value up-projection into the output, multi-head latent attention is multi-query attention whose
single key is the whole cached row (latent and rotary part) and whose value is the latent alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mla_decode(
    q: Tensor,
    cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    *,
    max_length: int,
    kv_lora_rank: int,
    scale: float,
) -> Tensor:
    """softmax(q . rows * scale) . latents for each query row over its request's cached rows.

    q [B, H, W] with W = kv_lora_rank + rotary width; cache [pages, page_size, W]; page_table
    [all slots, P] int32; slots [B] int64: each row's line in page_table; lengths [B] int32: rows
    to attend to, at least 1 and at most max_length. The result is [B, H, kv_lora_rank] in q's
    dtype; the arithmetic is float32.
    """
    batch, _, width = q.shape
    page_size = cache.shape[1]
    num_pages = -(-max_length // page_size)
    assert cache.shape[-1] == width and slots.shape == lengths.shape == (batch,), (
        f"q {tuple(q.shape)}, cache {tuple(cache.shape)}, "
        f"slots {tuple(slots.shape)}, lengths {tuple(lengths.shape)}"
    )
    assert 0 < num_pages <= page_table.shape[1], (
        f"max_length {max_length}, page_table {tuple(page_table.shape)} x {page_size}"
    )
    pages = page_table[:, :num_pages].index_select(0, slots)
    within_page = torch.arange(page_size, dtype=torch.int32, device=q.device)
    locations = (pages[:, :, None] * page_size + within_page).view(batch, -1)[:, :max_length]

    # Beyond a request's length lie rows of others or of nobody. They get probability 0, but 0 * NaN
    # would still spread from one request to another: read the request's own first row instead.
    beyond = torch.arange(max_length, dtype=torch.int32, device=q.device) >= lengths[:, None]
    locations = torch.where(beyond, locations[:, :1], locations).flatten()
    rows = cache.view(-1, width).index_select(0, locations).view(batch, max_length, width).float()

    scores = torch.matmul(q.float(), rows.transpose(1, 2)) * scale
    probabilities = scores.masked_fill_(beyond[:, None], float("-inf")).softmax(dim=-1)
    return torch.matmul(probabilities, rows[:, :, :kv_lora_rank]).to(q.dtype)
