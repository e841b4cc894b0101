"""Decode of grouped-query attention for the nodes of trees of drafts: `gqa_decode`, where a row attends to the tokens in
front of the root of its slot, and to its ancestors. On a GPU it is `gqa_decode_triton` with a `tail`.

The nodes of a slot have the same tokens before them. On a GPU the cache is therefore read once for all of them, as
for further query heads. The attention among the nodes is one more kernel, whose results are merged with the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.attention.tree_tail import TreeTail
from mla_router.worker.kernels.kv_cache.fp8 import UNSCALED, KVScales
from mla_router.worker.kernels.kv_cache.gather import kv_take
from mla_router.worker.kernels.kv_cache.gqa_rows import keys_and_values
from mla_router.worker.kernels.kv_cache.paged_rows import paged_rows


def gqa_tree_decode_torch(
    q: Tensor,
    cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    tail: TreeTail,
    out: Tensor,
    *,
    max_length: int,
    scale: float,
    scales: KVScales = UNSCALED,
) -> None:
    """Writes softmax(q . keys * scale) . values for each query head over `lengths` cached tokens of its request and the
    visible keys of `tail` to `out`. Tensors are those of `gqa_decode`."""
    batch, heads, head_dim = q.shape
    kv_heads = cache.shape[-1] // (head_dim + out.shape[-1])
    locations, beyond = paged_rows(
        page_table, slots, lengths, page_size=cache.shape[1], max_length=max_length
    )
    sees = tail.sees()
    # As in `paged_rows`, an invisible key is replaced by a visible one, which has no NaN
    nodes = torch.where(sees, tail.locations(), locations[:, :1])
    locations = torch.cat((locations.long(), nodes), dim=1)
    hidden = torch.cat((beyond, ~sees), dim=1)
    rows = kv_take(
        cache,
        locations.flatten(),
        dtype=torch.float32,
        scales=scales,
        value_column=kv_heads * head_dim,
    ).view(*locations.shape, -1)
    keys, values = (  # [B, G, N, W or V]
        part.transpose(1, 2) for part in keys_and_values(rows, head_dim, out.shape[-1])
    )
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim).float()
    scores = torch.matmul(grouped, keys.transpose(-1, -2)) * scale
    probabilities = scores.masked_fill_(hidden[:, None, None], float("-inf")).softmax(dim=-1)
    out.copy_(torch.matmul(probabilities, values).view(out.shape))
