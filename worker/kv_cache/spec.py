"""Specifications of the KV cache of a layer: the row that it keeps for each token.

The module does not import torch, because model configs use it before torch is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec(ABC):
    """The KV cache row of one token in one layer."""

    dtype: torch.dtype
    window: int | None = None  # number of last tokens that attention reads; None: all

    @property
    @abstractmethod
    def width(self) -> int:
        """Elements of a row."""

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec(KVCacheSpec):
    """Multi-head latent attention (MLA): the latent of the keys and values of all heads, and the rotary key that the
    heads share."""

    kv_lora_rank: int
    qk_rope_head_dim: int

    @property
    def width(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsSpec(KVCacheSpec):
    """Multi-head and grouped-query attention: the keys of all KV heads, then their values."""

    num_kv_heads: int
    head_dim: int  # of keys
    v_head_dim: int

    @property
    def width(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)


def own_window(specs: Sequence[KVCacheSpec]) -> int | None:
    """Returns the window in tokens of layers that have pages of their own; None if all layers have the same pages.

    They do where half of the layers have a window, and rows are equal otherwise. A page then has memory for half of the
    layers, and is of either kind. Other mixtures would waste memory in one of the kinds.
    """
    windowed = [spec for spec in specs if spec.window is not None]
    if 2 * len(windowed) != len(specs) or len({replace(spec, window=None) for spec in specs}) != 1:
        return None
    (window, *others) = {spec.window for spec in windowed}
    return None if others else window


def bytes_per_token(specs: Iterable[KVCacheSpec]) -> int:
    """Returns the bytes of one token in all layers."""
    return sum(spec.bytes_per_token for spec in specs)
