"""Causal attention of prefill chunks, each after a cached prefix of its own request.

Several query heads may share a key head: grouped-query attention (Ainslie et al., 2023,
arXiv:2305.13245). MLA's prefill is the case of one query head a key head: many query tokens share
the work of expanding the latents to per-head keys and values, and the expanded form needs about a
quarter of the absorbed form's arithmetic (DeepSeek-V2, arXiv:2405.04434, section 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Bounds the score matrix [H, queries, keys] that is alive at a time.
QUERY_BLOCK = 256


def gqa_prefill(
    q: Tensor, k: Tensor, v: Tensor, extents: Sequence[tuple[int, int]], *, scale: float
) -> Tensor:
    """Attention within each chunk, ragged.

    q [N, H, D], k [S, G, D], v [S, G, V] with H a multiple of G: query heads i * H / G and those
    after it share key head i. The rows of chunk after chunk; `extents` holds for each its (query rows
    n, key rows s), n <= s: its queries are the last n of the s positions, and each sees the keys up to
    its own. The result is [N, H, V] in q's dtype; the arithmetic is float32.
    """
    heads, width = q.shape[1:]
    groups = k.shape[1]
    assert k.shape[2] == width and v.shape[:2] == k.shape[:2] and heads % groups == 0, (
        f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    )
    assert q.shape[0] == sum(n for n, _ in extents) and k.shape[0] == sum(s for _, s in extents), (
        f"q {tuple(q.shape)}, k {tuple(k.shape)}, extents {extents}"
    )
    out = q.new_empty(q.shape[0], groups, heads // groups, v.shape[-1])
    first_query = first_key = 0
    for queries, keys in extents:
        chunk_q = q[first_query : first_query + queries]
        chunk_q = chunk_q.reshape(queries, groups, -1, width).permute(1, 2, 0, 3).float()
        chunk_k = k[first_key : first_key + keys].permute(1, 2, 0)[:, None].float()
        chunk_v = v[first_key : first_key + keys].transpose(0, 1)[:, None].float()
        for begin in range(0, queries, QUERY_BLOCK):
            rows = min(QUERY_BLOCK, queries - begin)
            seen = keys - queries + begin + rows  # keys that the block's last query sees
            block = chunk_q[:, :, begin : begin + rows]
            scores = torch.matmul(block, chunk_k[..., :seen]) * scale
            future = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
            scores[..., seen - rows :].masked_fill_(future, float("-inf"))
            attended = torch.matmul(scores.softmax(dim=-1), chunk_v[..., :seen, :])
            row = first_query + begin
            out[row : row + rows] = attended.permute(2, 0, 1, 3)
        first_query += queries
        first_key += keys
    return out.flatten(1, 2)
