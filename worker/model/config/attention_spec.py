"""The attention of one layer, declared by a model's config and read by attention backends.

This module does not import torch, since a config is read before anything is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_router.worker.kv_cache.spec import HeadsSpec, KVCacheSpec, LatentSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(ABC):
    """The attention of one layer."""

    num_heads: int  # query heads
    scale: float  # of scores
    window: int | None = None  # number of last tokens that a query attends to; None: all
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)

    @abstractmethod
    def kv_cache_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """Returns the rows of this attention in a KV cache of `dtype`."""

    @property
    @abstractmethod
    def prefill_kv_dim(self) -> int:
        """Numbers of one token's keys and values in prefill, of all heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec(AttentionSpec):
    """Multi-head latent attention: absorbed multi-query attention in decode, multi-head attention in prefill."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def head_dim(self) -> int:
        """Numbers of a query and of a key of one head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def kv_cache_spec(self, dtype: torch.dtype) -> LatentSpec:
        return LatentSpec(
            dtype=dtype,
            window=self.window,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
        )

    @property
    def prefill_kv_dim(self) -> int:
        return self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttentionSpec(AttentionSpec):
    """Grouped-query attention: each of `num_kv_heads` KV heads serves the same number of query heads. Multi-head
    attention has one KV head for each query head."""

    num_kv_heads: int
    head_dim: int  # of queries and keys
    v_head_dim: int

    def kv_cache_spec(self, dtype: torch.dtype) -> HeadsSpec:
        return HeadsSpec(
            dtype=dtype,
            window=self.window,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
        )

    @property
    def prefill_kv_dim(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)
