"""Attention as a layer calls it: the tokens of one step over the cached rows of their requests.

The object behind this protocol knows the requests, their pages, the scale of scores and the kernels; a layer brings queries
and its KV cache, in which the rows of the new tokens lie already. Decode rows come first in a step, then its prefill
chunks; each method is for one of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class StepAttention(Protocol):
    """Attention of one step, for all layers of one `AttentionSpec`. D decode rows, N prefill rows, H heads, G key heads."""

    def mla_decode(self, q_latent: Tensor, q_pe: Tensor, cache: Tensor) -> Tensor:
        """Absorbed: q_latent [D, H, C] and q_pe [D, H, R] over latent rows, cache
        [pages, page_size, C + R]. Attended latents [D, H, C]."""
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
    ) -> None:
        """Multi-head: q [N, H, K + R] over keys and values that `expand` makes of latents: from
        [S, C] it gives [S, H, K + V], C being kv_lora_rank. `own` [N, C + R] are the chunks' rows, which the
        cache has as well. Writes `out` [N, H, V], contiguous."""
        ...

    def gqa_decode(self, q: Tensor, cache: Tensor, out: Tensor) -> None:
        """q [D, H, W] over the keys and values in rows of cache [pages, page_size, G * (W + V)]
        (`kernels/kv_cache/gqa_rows.py`). Writes `out` [D, H, V], contiguous."""
        ...

    def gqa_prefill(self, q: Tensor, cache: Tensor, out: Tensor) -> None:
        """The same for q [N, H, W] of the chunks and `out` [N, H, V]."""
        ...
