"""Everything between the projections of multi-head latent attention and the attention (DeepSeek-V2, arXiv:2405.04434,
section 2.1.3): rotary embedding of queries and key, normalisation of the latent, and the write of key and latent to the
paged cache.

The torch function is made of `rotary`, `rms_norm` and `kv_write`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.kv_cache.fp8 import from_cache, largest_of, stored, to_cache
from mla_router.worker.kernels.kv_cache.write import kv_write
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.kernels.rms_norm import normalized, rms_norm_torch
from mla_router.worker.kernels.rotary import rotary, rotate_rows, rotation_of

# Heads of a token for one program.
_BLOCK_HEADS = 16


def rope_kv_write(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotations: Tensor,
    cache: Tensor,
    out_cache_loc: Tensor,
    *,
    interleaved: bool,
    in_place: bool = False,
    kv_scale: float = 1.0,
) -> None:
    """Rotates the last R numbers of every head of q in place, and writes rms_norm(kv[t, :C]) followed by the rotated
    kv[t, C:] to row `out_cache_loc[t]` of the cache, for T tokens; with `in_place` to kv[t] as well: the numbers that
    are later read from the cache, so that attention over new and over cached rows is equal. `kv_scale`: of an FP8 cache
    (`fp8.py`), which stores the rotary key in FP8 as well.

    q [T, H, D + R] and kv [T, C + R] are of one dtype and may be views, contiguous in the last axis; norm_weight [C]
    of that dtype; cache [pages, page_size, C + R], contiguous, to whose dtype rows are converted;
    rotations [T, R/2] complex64; out_cache_loc [T] int64, distinct except for page 0, whose content is never read.
    """
    write = rope_kv_write_triton if on_gpu(q) else rope_kv_write_torch
    write(
        q,
        kv,
        norm_weight,
        eps,
        rotations,
        cache,
        out_cache_loc,
        interleaved=interleaved,
        in_place=in_place,
        kv_scale=kv_scale,
    )


def rope_kv_write_torch(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotations: Tensor,
    cache: Tensor,
    out_cache_loc: Tensor,
    *,
    interleaved: bool,
    in_place: bool = False,
    kv_scale: float = 1.0,
) -> None:
    width = 2 * rotations.shape[1]
    q_pe, k_pe = q[..., -width:], kv[:, None, -width:]
    turned, k_pe = rotary(q_pe, k_pe, rotations, interleaved=interleaved)
    q_pe.copy_(turned)
    latent = rms_norm_torch(kv[:, :-width], norm_weight, eps)
    rows = torch.cat((latent, k_pe.flatten(1)), dim=-1)
    rows = to_cache(rows, cache.dtype, kv_scale)
    kv_write(cache, out_cache_loc, rows)
    if in_place:
        kv.copy_(from_cache(rows, kv.dtype, kv_scale))


def rope_kv_write_triton(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotations: Tensor,
    cache: Tensor,
    out_cache_loc: Tensor,
    *,
    interleaved: bool,
    in_place: bool = False,
    kv_scale: float = 1.0,
    num_warps: int = 4,
) -> None:
    """Launches for every token a program for each 16 heads, and one for the cache row."""
    work = rope_kv_work(
        q,
        kv,
        norm_weight,
        eps,
        rotations,
        cache,
        out_cache_loc,
        interleaved=interleaved,
        in_place=in_place,
        kv_scale=kv_scale,
    )
    _rope_kv_write_kernel[(len(q), work.programs)](work, num_warps=num_warps, **launch_options())


class RopeKvWork(NamedTuple):
    """The arguments of `rope_kv_program`: the tensors of `rope_kv_write`, strides and sizes, and blocks of H heads, C
    latents and R rotated numbers."""

    q_pe: Tensor
    kv: Tensor
    norm_weight: Tensor
    rotations: Tensor  # [T, R/2, 2] float32
    cache: Tensor
    out_cache_loc: Tensor
    q_token_stride: int
    q_head_stride: int
    kv_stride: int
    eps: float
    kv_scale: float
    inverse_scale: float
    H: tl.constexpr
    C: tl.constexpr
    R: tl.constexpr
    BLOCK_H: tl.constexpr
    BLOCK_C: tl.constexpr
    BLOCK_R: tl.constexpr
    INTERLEAVED: tl.constexpr
    IN_PLACE: tl.constexpr
    LARGEST: tl.constexpr

    @property
    def programs(self) -> int:
        """Programs for one token."""
        return -(-int(self.H.value) // int(self.BLOCK_H.value)) + 1


def rope_kv_work(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotations: Tensor,
    cache: Tensor,
    out_cache_loc: Tensor,
    *,
    interleaved: bool,
    in_place: bool = False,
    kv_scale: float = 1.0,
) -> RopeKvWork:
    """Returns the arguments for a call of `rope_kv_write`. Checks shapes and strides."""
    tokens, heads, _ = q.shape
    latent, width = len(norm_weight), 2 * rotations.shape[1]
    assert (
        kv.shape == (tokens, latent + width)
        and cache.shape[2:] == kv.shape[1:]
        and rotations.shape[:1] == out_cache_loc.shape == (tokens,)
        and q.shape[2] >= width
        and q.dtype == kv.dtype == norm_weight.dtype
        and q.stride(2) == kv.stride(1) == norm_weight.stride(0) == out_cache_loc.stride(0) == 1
        and cache.is_contiguous()
        and rotations.is_contiguous()
    ), (
        f"q {tuple(q.shape)} {q.stride()} {q.dtype}, kv {tuple(kv.shape)} {kv.stride()} {kv.dtype}, "
        f"norm_weight {tuple(norm_weight.shape)} {norm_weight.dtype}, "
        f"rotations {tuple(rotations.shape)}, cache {tuple(cache.shape)} "
        f"contiguous {cache.is_contiguous()}, out_cache_loc {tuple(out_cache_loc.shape)}"
    )
    return RopeKvWork(
        q[..., -width:],
        kv,
        norm_weight,
        torch.view_as_real(rotations),
        cache,
        out_cache_loc,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        eps,
        kv_scale,
        1 / kv_scale,
        H=tl.constexpr(heads),
        C=tl.constexpr(latent),
        R=tl.constexpr(width),
        BLOCK_H=tl.constexpr(min(triton.next_power_of_2(heads), _BLOCK_HEADS)),
        BLOCK_C=tl.constexpr(triton.next_power_of_2(latent)),
        BLOCK_R=tl.constexpr(triton.next_power_of_2(width)),
        INTERLEAVED=tl.constexpr(interleaved),
        IN_PLACE=tl.constexpr(in_place),
        LARGEST=tl.constexpr(largest_of(cache.dtype)),
    )


@triton.jit
def _rope_kv_write_kernel(work):
    wait_for_previous()
    rope_kv_program(tl.program_id(0), tl.program_id(1), work)


@triton.jit
def rope_kv_program(token, block, work):
    """Rotates the heads of `block`, or, after the last of them, writes the token's row of the cache."""
    token = token.to(tl.int64)
    cos, sin = rotation_of(work.rotations, token, work.R, work.BLOCK_R)
    if block * work.BLOCK_H < work.H:
        head = block * work.BLOCK_H + tl.arange(0, work.BLOCK_H)[:, None]
        rows = work.q_pe + token * work.q_token_stride + head * work.q_head_stride
        wait_for_previous()
        rotate_rows(
            rows,
            rows,
            head < work.H,
            cos,
            sin,
            work.R,
            work.BLOCK_H,
            work.BLOCK_R,
            work.INTERLEAVED,
        )
    else:
        source = work.kv + token * work.kv_stride
        target = work.cache + tl.load(work.out_cache_loc + token) * (work.C + work.R)
        column = tl.arange(0, work.BLOCK_C)
        scale = tl.load(work.norm_weight + column, column < work.C, other=0.0)
        wait_for_previous()
        values = tl.load(source + column, column < work.C, other=0.0)
        row = stored(
            normalized(values, scale, work.eps, work.C),
            target.dtype.element_ty,
            work.inverse_scale,
            work.LARGEST,
        )
        tl.store(target + column, row, column < work.C)
        one = tl.zeros((1, 1), dtype=tl.int32)
        key, cached = source + work.C + one, target + work.C + one
        rotate_rows(
            key,
            cached,
            one == 0,
            cos,
            sin,
            work.R,
            1,
            work.BLOCK_R,
            work.INTERLEAVED,
            work.inverse_scale,
            work.LARGEST,
        )
        if work.IN_PLACE:
            if work.LARGEST > 0:
                tl.store(source + column, _read(row, source, work), column < work.C)
                tl.debug_barrier()  # other threads' writes to the cache are read here
                rope = tl.arange(0, work.BLOCK_R)[None, :]
                turned = tl.load(cached + rope, rope < work.R, other=0.0)
                tl.store(key + rope, _read(turned, source, work), rope < work.R)
            else:
                tl.store(source + column, row.to(source.dtype.element_ty), column < work.C)
                rotate_rows(key, key, one == 0, cos, sin, work.R, 1, work.BLOCK_R, work.INTERLEAVED)


@triton.jit
def _read(row, source, work):
    """Returns numbers of an FP8 cache as attention reads them."""
    return (row.to(tl.float32) * work.kv_scale).to(source.dtype.element_ty)
