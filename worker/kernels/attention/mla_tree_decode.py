"""Decode of absorbed multi-head latent attention for the nodes of trees of drafts: `mla_decode`, where a row attends to
the tokens before the root of its slot, and to its ancestors. On a GPU it is `mla_decode_triton` with a `tail`.

The nodes of a slot have the same tokens before them. On a GPU these are read once for all nodes, as a common
prefix of requests is (`shared_prefixes.py`). The attention among the nodes is one more kernel, whose results are merged
with the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.attention.tree_tail import TreeTail
from mla_router.worker.kernels.kv_cache.fp8 import KVScales
from mla_router.worker.kernels.kv_cache.gather import kv_take
from mla_router.worker.kernels.kv_cache.paged_rows import paged_rows


def mla_tree_decode_torch(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    tail: TreeTail,
    *,
    max_length: int,
    scale: float,
    kv_scale: float = 1.0,
) -> Tensor:
    """Returns softmax((q_latent | q_pe) . rows * scale) . latents for each query over `lengths` cached rows of its
    request and the visible keys of `tail`, [B, H, C]. `slots` [B] int64 and `lengths` [B] int32 are those of the rows.
    The other tensors are those of `mla_decode`."""
    locations, beyond = paged_rows(
        page_table, slots, lengths, page_size=cache.shape[1], max_length=max_length
    )
    sees = tail.sees()
    # As in `paged_rows`, an invisible key is replaced by a visible one, which has no NaN
    nodes = torch.where(sees, tail.locations(), locations[:, :1])
    locations = torch.cat((locations.long(), nodes), dim=1)
    hidden = torch.cat((beyond, ~sees), dim=1)
    rows = kv_take(
        cache, locations.flatten(), dtype=torch.float32, scales=KVScales(kv_scale, kv_scale)
    ).view(*locations.shape, -1)
    scores = torch.cat((q_latent, q_pe), dim=-1).float() @ rows.transpose(1, 2) * scale
    weights = scores.masked_fill_(hidden[:, None], float("-inf")).softmax(dim=-1)
    return (weights @ rows[..., : q_latent.shape[-1]]).to(q_latent.dtype)
