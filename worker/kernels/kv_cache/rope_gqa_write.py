"""Everything between the projections of grouped-query attention and the attention: rotary embedding of queries and
keys, and the write of keys and values to the paged cache.

The torch function is made of `rotary` and `kv_write`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.kv_cache.fp8 import (
    UNSCALED,
    KVScales,
    largest_of,
    stored,
    to_cache,
)
from mla_router.worker.kernels.kv_cache.write import kv_write
from mla_router.worker.kernels.pdl import launch_options, reads_early, start_next, wait_for_previous
from mla_router.worker.kernels.rotary import rotary, rotate_rows, rotation_of

# Heads of a token for one program.
_BLOCK_HEADS = 16


def rope_gqa_write(
    q: Tensor,
    k: Tensor,
    k_pe: Tensor,
    v: Tensor,
    rotations: Tensor,
    cache: Tensor,
    out_cache_loc: Tensor,
    *,
    interleaved: bool,
    scales: KVScales = UNSCALED,
    settled: bool = False,
) -> None:
    """Rotates the last R numbers of every head of q in place, and writes rows of T tokens to the cache: for each KV head
    the key k[t, g] followed by the rotated k_pe[t, g], and the value v[t, g], to row `out_cache_loc[t]` (`gqa_rows.py`).

    q [T, H, D + R]; cache [pages, page_size, G * (D + R + V)], contiguous, to whose dtype rows are converted;
    k [T, G, D], where D may be 0, k_pe [T, G, R] and v [T, G, V] of q's dtype. All but the cache may be views,
    contiguous in the last axis; k_pe may be expanded from one head. rotations [T, R/2] complex64;
    out_cache_loc [T] int64, distinct except for page 0, whose content is never read. `scales`: of an FP8 cache
    (`fp8.py`). `settled`: rotations and out_cache_loc are (`pdl.py`).
    """
    rows = (q, k, k_pe, v, rotations, cache, out_cache_loc)
    if on_gpu(q):
        rope_gqa_write_triton(*rows, interleaved=interleaved, scales=scales, settled=settled)
    else:
        rope_gqa_write_torch(*rows, interleaved=interleaved, scales=scales)


def rope_gqa_write_torch(
    q: Tensor,
    k: Tensor,
    k_pe: Tensor,
    v: Tensor,
    rotations: Tensor,
    cache: Tensor,
    out_cache_loc: Tensor,
    *,
    interleaved: bool,
    scales: KVScales = UNSCALED,
) -> None:
    q_pe = q[..., k.shape[-1] :]
    turned, k_pe = rotary(q_pe, k_pe, rotations, interleaved=interleaved)
    q_pe.copy_(turned)
    keys = to_cache(torch.cat((k, k_pe), dim=-1).flatten(1), cache.dtype, scales.keys)
    values = to_cache(v.flatten(1), cache.dtype, scales.values)
    kv_write(cache, out_cache_loc, torch.cat((keys, values), dim=-1))


def rope_gqa_write_triton(
    q: Tensor,
    k: Tensor,
    k_pe: Tensor,
    v: Tensor,
    rotations: Tensor,
    cache: Tensor,
    out_cache_loc: Tensor,
    *,
    interleaved: bool,
    scales: KVScales = UNSCALED,
    settled: bool = False,
    num_warps: int = 4,
) -> None:
    """Launches for every token a program for each 16 query heads, and one for each 16 KV heads."""
    (tokens, heads, head_dim), (kv_heads, d), rope = q.shape, k.shape[1:], k_pe.shape[-1]
    v_head_dim = v.shape[-1]
    assert (
        k.shape[:2] == k_pe.shape[:2] == v.shape[:2] == (tokens, kv_heads)
        and head_dim == d + rope
        and rotations.shape == (tokens, rope // 2)
        and out_cache_loc.shape == (tokens,)
        and cache.shape[-1] == kv_heads * (head_dim + v_head_dim)
        and all(x.dtype == q.dtype and x.stride(-1) == 1 for x in (q, k, k_pe, v))
        and out_cache_loc.stride(0) == 1
        and cache.is_contiguous()
        and rotations.is_contiguous()
    ), (
        f"q {tuple(q.shape)} {q.stride()} {q.dtype}, k {tuple(k.shape)} {k.stride()} {k.dtype}, "
        f"k_pe {tuple(k_pe.shape)} {k_pe.stride()} {k_pe.dtype}, "
        f"v {tuple(v.shape)} {v.stride()} {v.dtype}, rotations {tuple(rotations.shape)}, "
        f"cache {tuple(cache.shape)} contiguous {cache.is_contiguous()}, "
        f"out_cache_loc {tuple(out_cache_loc.shape)}"
    )
    block_h, block_g = (min(triton.next_power_of_2(n), _BLOCK_HEADS) for n in (heads, kv_heads))
    _rope_gqa_write_kernel[(tokens, triton.cdiv(heads, block_h) + triton.cdiv(kv_heads, block_g))](
        q[..., d:],
        k,
        k_pe,
        v,
        torch.view_as_real(rotations),
        cache,
        out_cache_loc,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        k_pe.stride(0),
        k_pe.stride(1),
        v.stride(0),
        v.stride(1),
        1 / scales.keys,
        1 / scales.values,
        H=heads,
        G=kv_heads,
        D=d,
        R=rope,
        V=v_head_dim,
        BLOCK_H=block_h,
        BLOCK_G=block_g,
        BLOCK_D=triton.next_power_of_2(d) if d else 0,
        BLOCK_R=triton.next_power_of_2(rope),
        BLOCK_V=triton.next_power_of_2(v_head_dim),
        INTERLEAVED=interleaved,
        SETTLED=settled,
        LARGEST=largest_of(cache.dtype),
        num_warps=num_warps,
        **launch_options(),
    )


@reads_early({"SETTLED": ("rotations", "out_cache_loc")})
@triton.jit
def _rope_gqa_write_kernel(
    q_pe,
    k,
    k_pe,
    v,
    rotations,
    cache,
    out_cache_loc,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    k_pe_token_stride,
    k_pe_head_stride,
    v_token_stride,
    v_head_stride,
    inverse_key_scale,
    inverse_value_scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SETTLED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    start_next()
    if not SETTLED:
        wait_for_previous()
    QUERY_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos, sin = rotation_of(rotations, token, R, BLOCK_R)
    row = cache + tl.load(out_cache_loc + token) * (G * (D + R + V))
    wait_for_previous()
    if block < QUERY_BLOCKS:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        rows = q_pe + token * q_token_stride + head * q_head_stride
        rotate_rows(rows, rows, head < H, cos, sin, R, BLOCK_H, BLOCK_R, INTERLEAVED)
    else:
        kv_head = (block - QUERY_BLOCKS) * BLOCK_G + tl.arange(0, BLOCK_G)[:, None]
        exists = kv_head < G
        key = row + kv_head * (D + R)
        if D > 0:
            _copy(
                k + token * k_token_stride + kv_head * k_head_stride,
                key,
                exists,
                inverse_key_scale,
                D,
                BLOCK_D,
                LARGEST,
            )
        source = k_pe + token * k_pe_token_stride + kv_head * k_pe_head_stride
        rotate_rows(
            source,
            key + D,
            exists,
            cos,
            sin,
            R,
            BLOCK_G,
            BLOCK_R,
            INTERLEAVED,
            inverse_key_scale,
            LARGEST,
        )
        value = row + G * (D + R) + kv_head * V
        _copy(
            v + token * v_token_stride + kv_head * v_head_stride,
            value,
            exists,
            inverse_value_scale,
            V,
            BLOCK_V,
            LARGEST,
        )


@triton.jit
def _copy(
    source,
    target,
    row_mask,
    inverse_scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    mask = row_mask & (column < WIDTH)
    values = tl.load(source + column, mask, other=0.0)
    kept = stored(values, target.dtype.element_ty, inverse_scale, LARGEST)
    tl.store(target + column, kept, mask)
