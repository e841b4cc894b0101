"""Attention of prefill chunks of different lengths, in one launch.

Several query heads may share a KV head: grouped-query attention (Ainslie et al., 2023,
arXiv:2305.13245). Keys may have a second part that all heads share, such as MLA's rotary key
(DeepSeek-V2, arXiv:2405.04434, section 2.1). Keys are not concatenated: both parts are read in place.
"""

from __future__ import annotations

from torch import Tensor

from mla_router.worker.kernels.attention.prefill_work import PrefillWork
from mla_router.worker.kernels.attention.ragged_attention.hopper import (
    ragged_attention_hopper,
    suits_hopper,
)
from mla_router.worker.kernels.attention.ragged_attention.kernel import ragged_attention_triton
from mla_router.worker.kernels.attention.ragged_attention.torch import ragged_attention_torch
from mla_router.worker.kernels.dispatch import on_gpu


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared_keys: Tensor | None,
    work: PrefillWork,
    *,
    scale: float,
    out: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns softmax(q . keys * scale) . v within each chunk of `work`, [N, H, V] in q's dtype, and the log-sum-exp of
    each row of scores in base 2, [N, H] float32, for `merge_states`. The result is written to `out` (contiguous) if it
    is given. A row without keys is 0, with the log-sum-exp -inf.

    q [N, H, D + R], k [S, G, D], v [S, G, V], shared_keys [S, R] or None (R = 0), all of one dtype,
    contiguous in the last axis; H is a multiple of G: query heads [i * H / G, (i + 1) * H / G) share KV head i. The key
    of a head is its own D numbers, then R numbers that all heads share. If `work` is causal, the
    queries of a chunk are its last positions, and each attends to the keys up to its own; otherwise
    each attends to all keys of its chunk. `work.window` leaves out those before its last positions. `softcap` caps the
    scores (`softcap.py`).
    """
    (num_queries, heads, width), (num_keys, groups, d) = q.shape, k.shape
    assert v.shape[:2] == k.shape[:2] and heads % groups == 0 and width >= d, (
        f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    )
    shared_shape = (0, 0) if shared_keys is None else tuple(shared_keys.shape)
    assert shared_shape == ((num_keys, width - d) if width > d else (0, 0)), (
        f"q {tuple(q.shape)}, k {tuple(k.shape)}, shared keys {shared_shape}"
    )
    assert num_queries == work.num_queries and num_keys == work.num_keys, (
        f"q {tuple(q.shape)}, k {tuple(k.shape)}, extents {work.extents}"
    )
    assert out is None or out.is_contiguous(), f"out {tuple(out.shape)}, strides {out.stride()}"
    if on_gpu(q):
        suits = suits_hopper(q, k, v, shared_keys, work)
        op = ragged_attention_hopper if suits else ragged_attention_triton
        return op(q, k, v, shared_keys, work, scale=scale, out=out, softcap=softcap)
    return ragged_attention_torch(
        q,
        k,
        v,
        shared_keys,
        work.extents,
        scale=scale,
        causal=work.causal,
        out=out,
        window=work.window,
        gaps=work.gaps,
        softcap=softcap,
    )
