"""The interface between a layer and an attention backend.

The backend knows the requests, their pages, the softmax scale and the kernels. A layer passes queries and its KV
cache, to which it has written the rows of the new tokens. A step has decode rows first, then prefill chunks; each
method takes one kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from mla_router.worker.kernels.kv_cache.fp8 import UNSCALED, KVScales


class StepAttention(Protocol):
    """Attention of one step, for all layers of one `AttentionSpec`. D: decode rows, N: prefill rows, H: query heads,
    G: KV heads, W: head_dim, V: v_head_dim, K and R: qk_nope_head_dim and qk_rope_head_dim, C: kv_lora_rank. `scales`: of
    the layer, if the cache is FP8 (`kernels/kv_cache/fp8.py`)."""

    def mla_decode(
        self, q_latent: Tensor, q_pe: Tensor, cache: Tensor, *, scales: KVScales = UNSCALED
    ) -> Tensor:
        """Absorbed multi-query attention of q_latent [D, H, C] and q_pe [D, H, R] over the latent rows of `cache`
        [pages, page_size, C + R]. Returns attended latents [D, H, C]."""
        ...

    def mla_prefill(
        self,
        q: Tensor,
        own: Tensor,
        cache: Tensor,
        expand: Callable[[Tensor], Tensor],
        out: Tensor,
        *,
        kv_lora_rank: int,
        scales: KVScales = UNSCALED,
    ) -> None:
        """Multi-head attention of q [N, H, K + R]. `expand` computes keys and values [S, H, K + V] from latents
        [S, C]. `own` [N, C + R] are the rows of the chunks, which are in `cache` as well. Writes `out` [N, H, V],
        contiguous."""
        ...

    def gqa_decode(
        self, q: Tensor, cache: Tensor, out: Tensor, *, scales: KVScales = UNSCALED
    ) -> None:
        """Grouped-query attention of q [D, H, W] over the keys and values in the rows of `cache`
        [pages, page_size, G * (W + V)] (`kernels/kv_cache/gqa_rows.py`). Writes `out` [D, H, V], contiguous."""
        ...

    def gqa_prefill(
        self, q: Tensor, cache: Tensor, out: Tensor, *, scales: KVScales = UNSCALED
    ) -> None:
        """Grouped-query attention of the chunks: q [N, H, W]. Writes `out` [N, H, V], contiguous."""
        ...
