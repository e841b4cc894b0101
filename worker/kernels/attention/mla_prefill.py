"""Prefill of multi-head latent attention: chunks, each after a cached prefix of its request.

It is not absorbed: many query tokens share the computation of per-head keys and values from latents, and multi-head
attention over these needs about a quarter of the arithmetic (DeepSeek-V2, arXiv:2405.04434, section 2.1).
"""

from __future__ import annotations

from torch import Tensor

from mla_router.worker.kernels.attention.prefill_work import PrefillWork
from mla_router.worker.kernels.attention.ragged_attention import ragged_attention


def mla_prefill(
    q: Tensor,
    kv: Tensor,
    k_pe: Tensor,
    work: PrefillWork,
    *,
    scale: float,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns attention [N, H, V] within each chunk of `work`, and the log-sum-exps [N, H] of the scores in base 2.

    q [N, H, D + R]; kv [S, H, D + V] from the latents: keys without their rotary part, then values; k_pe [S, R], the
    rotary keys that all heads share. For the rest see `ragged_attention`.
    """
    d = q.shape[-1] - k_pe.shape[-1]
    return ragged_attention(q, kv[..., :d], kv[..., d:], k_pe, work, scale=scale, out=out)
