"""`ragged_attention` in plain torch operations: its definition."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mla_router.worker.kernels.softcap import softcapped_torch

# Upper bound of the scores [H, queries, keys] in memory at a time.
QUERY_BLOCK = 256


def ragged_attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared_keys: Tensor | None,
    extents: Sequence[tuple[int, int]],
    *,
    scale: float,
    causal: bool = True,
    out: Tensor | None = None,
    window: int | None = None,
    gaps: Sequence[int] = (),
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`ragged_attention` in float32, or in float64 if q is. `extents` are the query rows and key rows of each chunk.
    `window` and `softcap`: as of an `AttentionSpec`. `gaps`: of `PrefillWork`."""
    exact = torch.promote_types(q.dtype, torch.float32)
    num_queries, heads, _ = q.shape
    _, groups, own = k.shape
    grouped = q.view(num_queries, groups, heads // groups, -1)
    if out is None:
        out = q.new_empty(num_queries, heads, v.shape[-1])
    by_group = out.view(num_queries, groups, heads // groups, -1)
    lse = q.new_empty(num_queries, groups, heads // groups, dtype=exact)
    first_query = first_key = 0
    for chunk, (queries, keys) in enumerate(extents):
        mine = slice(first_key, first_key + keys)
        chunk_k = k[mine].permute(1, 2, 0)[:, None].to(exact)  # [G, 1, D, keys]
        chunk_v = v[mine].transpose(0, 1)[:, None].to(exact)  # [G, 1, keys, V]
        shared = None if shared_keys is None else shared_keys[mine].T.to(exact)
        for begin in range(0, queries, QUERY_BLOCK):
            size = min(QUERY_BLOCK, queries - begin)
            rows = slice(first_query + begin, first_query + begin + size)
            seen = keys - queries + begin + size if causal else keys  # by the last query
            block = grouped[rows].permute(1, 2, 0, 3).to(exact)
            scores = torch.matmul(block[..., :own], chunk_k[..., :seen])
            if shared is not None:
                scores += torch.matmul(block[..., own:], shared[:, :seen])
            scores = softcapped_torch(scores.mul_(scale), softcap)
            if causal:
                future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
                scores[..., seen - size :].masked_fill_(future, float("-inf"))
            if window is not None:
                # Position of the first of the query rows, counted from the first key
                at = seen - size if causal else keys + gaps[chunk] + begin
                past = torch.ones(size, seen, dtype=torch.bool, device=q.device).tril(at - window)
                scores.masked_fill_(past, float("-inf"))
            probabilities = scores.softmax(dim=-1)
            if gaps:  # a query may see no key of this pass
                probabilities.masked_fill_(past, 0.0)
            attended = torch.matmul(probabilities, chunk_v[..., :seen, :])
            by_group[rows] = attended.permute(2, 0, 1, 3).to(q.dtype)
            lse[rows] = scores.logsumexp(dim=-1).permute(2, 0, 1) * math.log2(math.e)
        first_query += queries
        first_key += keys
    return out, lse.flatten(1, 2)
