"""`ragged_attention` in plain torch operations: its definition."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_router.worker.kernels.prefill_work import PrefillWork

# Bounds the score matrix [H, queries, keys] that is alive at a time.
QUERY_BLOCK = 256


def ragged_attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared_keys: Tensor | None,
    work: PrefillWork,
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """As `ragged_attention`, in float32 or, if q is float64, in that."""
    exact = torch.promote_types(q.dtype, torch.float32)
    share = q.shape[1] // k.shape[1]
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = q.new_empty(q.shape[:2], dtype=exact)
    first_query = first_key = 0
    for queries, keys in work.extents:
        mine = slice(first_key, first_key + keys)
        own_k, own_v = k[mine].to(exact), v[mine].to(exact).repeat_interleave(share, dim=1)
        if shared_keys is not None:
            shared = shared_keys[mine, None].to(exact).expand(-1, k.shape[1], -1)
            own_k = torch.cat((own_k, shared), dim=-1)
        own_k = own_k.repeat_interleave(share, dim=1)
        for begin in range(0, queries, QUERY_BLOCK):
            size = min(QUERY_BLOCK, queries - begin)
            rows = slice(first_query + begin, first_query + begin + size)
            seen = keys - queries + begin + size if causal else keys  # by the last of them
            scores = torch.einsum("nhd,shd->hns", q[rows].to(exact), own_k[:seen]) * scale
            if causal:
                future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
                scores[..., seen - size :].masked_fill_(future, float("-inf"))
            attended = torch.einsum("hns,shv->nhv", scores.softmax(dim=-1), own_v[:seen])
            out[rows] = attended.to(q.dtype)
            lse[rows] = scores.logsumexp(dim=-1).T * math.log2(math.e)
        first_query += queries
        first_key += keys
    return out, lse
