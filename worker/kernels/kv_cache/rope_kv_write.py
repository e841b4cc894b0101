"""What stands between the projections of multi-head latent attention and the attention itself
(DeepSeek-V2, arXiv:2405.04434, section 2.1.3): rotary embedding of queries and key, normalisation of the
latent, and the write of both into the paged cache.

Its parts are `rotary`, `rms_norm` and `kv_write`, of which the torch function is made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.kv_cache.write import kv_write
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.kernels.rms_norm import rms_norm_torch
from mla_router.worker.kernels.rotary import rotary, rotate_rows, rotation_of

# Heads of a token that one program rotates.
_BLOCK_HEADS = 16


def rope_kv_write(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotations: Tensor,
    cache: Tensor,
    locations: Tensor,
    *,
    interleaved: bool,
) -> None:
    """In place, for T tokens:

    q [T, H, D + R]: the last R of every head are rotated, as `rotary` says.
    cache [pages, page_size, C + R]: row `locations[t]` becomes rms_norm(kv[t, :C]) followed by the
    rotated kv[t, C:]. It is contiguous; what is written is converted to its dtype.

    q and kv [T, C + R] are of one dtype and may be views, contiguous in the last axis; norm_weight [C]
    of that dtype; rotations [T, R/2] complex64, locations [T] int64, distinct but for page 0, whose
    content nobody reads.
    """
    write = rope_kv_write_triton if on_gpu(q) else rope_kv_write_torch
    write(q, kv, norm_weight, eps, rotations, cache, locations, interleaved=interleaved)


def rope_kv_write_torch(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotations: Tensor,
    cache: Tensor,
    locations: Tensor,
    *,
    interleaved: bool,
) -> None:
    width = 2 * rotations.shape[1]
    q_pe, k_pe = q[..., -width:], kv[:, None, -width:]
    turned, k_pe = rotary(q_pe, k_pe, rotations, interleaved=interleaved)
    q_pe.copy_(turned)
    latent = rms_norm_torch(kv[:, :-width], norm_weight, eps)
    kv_write(cache, locations, torch.cat((latent, k_pe.flatten(1)), dim=-1))


def rope_kv_write_triton(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotations: Tensor,
    cache: Tensor,
    locations: Tensor,
    *,
    interleaved: bool,
    num_warps: int = 4,
) -> None:
    """For every token one program for each 16 heads, and one for the row of the cache."""
    tokens, heads, _ = q.shape
    latent, width = len(norm_weight), 2 * rotations.shape[1]
    assert (
        kv.shape == (tokens, latent + width)
        and cache.shape[2:] == kv.shape[1:]
        and rotations.shape[:1] == locations.shape == (tokens,)
        and q.shape[2] >= width
        and q.dtype == kv.dtype == norm_weight.dtype
        and q.stride(2) == kv.stride(1) == norm_weight.stride(0) == locations.stride(0) == 1
        and cache.is_contiguous()
        and rotations.is_contiguous()
    ), (
        f"q {tuple(q.shape)} {q.stride()} {q.dtype}, kv {tuple(kv.shape)} {kv.stride()} {kv.dtype}, "
        f"norm_weight {tuple(norm_weight.shape)} {norm_weight.dtype}, "
        f"rotations {tuple(rotations.shape)}, cache {tuple(cache.shape)} "
        f"contiguous {cache.is_contiguous()}, locations {tuple(locations.shape)}"
    )
    block = min(triton.next_power_of_2(heads), _BLOCK_HEADS)
    _rope_kv_write_kernel[(tokens, triton.cdiv(heads, block) + 1)](
        q[..., -width:],
        kv,
        norm_weight,
        torch.view_as_real(rotations),
        cache,
        locations,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        eps,
        H=heads,
        C=latent,
        R=width,
        BLOCK_H=block,
        BLOCK_C=triton.next_power_of_2(latent),
        BLOCK_R=triton.next_power_of_2(width),
        INTERLEAVED=interleaved,
        num_warps=num_warps,
        **launch_options(),
    )


@triton.jit
def _rope_kv_write_kernel(
    q_pe,
    kv,
    norm_weight,
    rotations,
    cache,
    locations,
    q_token_stride,
    q_head_stride,
    kv_stride,
    eps,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos, sin = rotation_of(rotations, token, R, BLOCK_R)
    if block * BLOCK_H < H:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        rows = q_pe + token * q_token_stride + head * q_head_stride
        rotate_rows(rows, rows, head < H, cos, sin, R, BLOCK_H, BLOCK_R, INTERLEAVED)
    else:
        source = kv + token * kv_stride
        target = cache + tl.load(locations + token) * (C + R)
        column = tl.arange(0, BLOCK_C)
        values = tl.load(source + column, column < C, other=0.0)
        wide = values.to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(wide * wide, 0) / C + eps)
        normed = (wide * inverse_rms).to(values.dtype).to(tl.float32)
        scale = tl.load(norm_weight + column, column < C, other=0.0).to(tl.float32)
        row = (scale * normed).to(values.dtype).to(cache.dtype.element_ty)
        tl.store(target + column, row, column < C)
        one = tl.zeros((1, 1), dtype=tl.int32)
        rotate_rows(
            source + C + one, target + C + one, one == 0, cos, sin, R, 1, BLOCK_R, INTERLEAVED
        )
