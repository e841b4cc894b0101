"""The cache row of grouped-query attention: keys of all KV heads, then their values."""

from __future__ import annotations

from torch import Tensor


def columns_of_keys(width: int, head_dim: int, v_head_dim: int) -> int:
    """Returns G * W of rows with `width` = G * (W + V) numbers."""
    kv_heads, rest = divmod(width, head_dim + v_head_dim)
    assert kv_heads and not rest, f"{width} columns, heads of {head_dim} and {v_head_dim}"
    return kv_heads * head_dim


def keys_and_values(rows: Tensor, head_dim: int, v_head_dim: int) -> tuple[Tensor, Tensor]:
    """Returns keys [..., G, W] and values [..., G, V] of rows [..., G * (W + V)] as views."""
    columns = columns_of_keys(rows.shape[-1], head_dim, v_head_dim)
    keys, values = rows.tensor_split([columns], dim=-1)
    shape = *rows.shape[:-1], columns // head_dim
    return keys.view(*shape, head_dim), values.view(*shape, v_head_dim)
