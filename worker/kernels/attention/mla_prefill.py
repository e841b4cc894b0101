"""Multi-head latent attention of prefill chunks, each after a cached prefix of its own request.

Not absorbed: many query tokens share the work of expanding the latents to per-head keys and values,
and the expanded form needs about a quarter of the absorbed form's arithmetic (DeepSeek-V2,
arXiv:2405.04434, section 2.1).
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
    """Attention within each chunk of `work`, ragged.

    q [N, H, D + R]; kv [S, H, D + V], what latents expand to: the keys without their rotary part, then
    the values; k_pe [S, R], the rotary keys of all heads. Returns [N, H, V] and the log-sum-exp [N, H]
    of the scores in base 2; all else as `ragged_attention` says.
    """
    d = q.shape[-1] - k_pe.shape[-1]
    return ragged_attention(q, kv[..., :d], kv[..., d:], k_pe, work, scale=scale, out=out)
