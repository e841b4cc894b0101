"""Attention of one new token per request over the paged latent cache, in MLA's absorbed form.

DeepSeek-V2 (arXiv:2405.04434, section 2.1): with the key up-projection absorbed into the query and
the value up-projection into the output, multi-head latent attention is multi-query attention whose
single key is the whole cached row (latent and rotary part) and whose value is the latent alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.paged_rows import paged_rows


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
    assert cache.shape[-1] == width and slots.shape == (batch,), (
        f"q {tuple(q.shape)}, cache {tuple(cache.shape)}, slots {tuple(slots.shape)}"
    )
    locations, beyond = paged_rows(
        page_table, slots, lengths, page_size=cache.shape[1], max_length=max_length
    )
    rows = cache.view(-1, width).index_select(0, locations.flatten())
    rows = rows.view(batch, max_length, width).float()

    scores = torch.matmul(q.float(), rows.transpose(1, 2)) * scale
    probabilities = scores.masked_fill_(beyond[:, None], float("-inf")).softmax(dim=-1)
    return torch.matmul(probabilities, rows[:, :, :kv_lora_rank]).to(q.dtype)
