"""The cache row of grouped-query attention: keys of all KV heads, then their values."""

from __future__ import annotations

from torch import Tensor


def keys_and_values(rows: Tensor, head_dim: int, v_head_dim: int) -> tuple[Tensor, Tensor]:
    """Returns keys [..., G, W] and values [..., G, V] of rows [..., G * (W + V)] as views."""
    kv_heads, rest = divmod(rows.shape[-1], head_dim + v_head_dim)
    assert kv_heads and not rest, f"rows {tuple(rows.shape)}, heads of {head_dim} and {v_head_dim}"
    keys, values = rows.tensor_split([kv_heads * head_dim], dim=-1)
    shape = *rows.shape[:-1], kv_heads
    return keys.view(*shape, head_dim), values.view(*shape, v_head_dim)
