"""A row of the KV cache of grouped-query attention: one token's keys of all key heads, then its values."""

from __future__ import annotations

from torch import Tensor


def keys_and_values(rows: Tensor, key_width: int, value_width: int) -> tuple[Tensor, Tensor]:
    """Keys [..., G, W] and values [..., G, V] in rows [..., G * (W + V)], as views."""
    groups, rest = divmod(rows.shape[-1], key_width + value_width)
    assert groups and not rest, f"rows {tuple(rows.shape)}, heads of {key_width} and {value_width}"
    keys, values = rows.tensor_split([groups * key_width], dim=-1)
    shape = *rows.shape[:-1], groups
    return keys.view(*shape, key_width), values.view(*shape, value_width)
