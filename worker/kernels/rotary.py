"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864).

DeepSeek rotates neighbouring pairs (x0, x1), (x2, x3), ... Llama's checkpoints on Hugging Face, and a few conversions
of DeepSeek's, rotate (x0, x_{R/2}), (x1, x_{R/2+1}), ... The result keeps the layout of the input. Queries and keys
have the same layout, so their dot products are the same.

`rotary` is the definition. Kernels rotate with `rotation_of` and `rotate_rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.kv_cache.fp8 import stored


def rotary(q: Tensor, k: Tensor, rotations: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotates each pair of every head by the angle of its token.

    q [T, H, R], k [T, G, R]; rotations [T, R/2] complex64, the rows of `model/rope.py`'s table for the positions of
    the tokens. With `interleaved` pairs are neighbours. The arithmetic is float32; results have the
    inputs' shapes and dtypes.
    """
    tokens, _, width = q.shape
    assert k.shape[::2] == (tokens, width) and rotations.shape == (tokens, width // 2), (
        f"q {tuple(q.shape)}, k {tuple(k.shape)}, rotations {tuple(rotations.shape)}"
    )
    turn = _turn_neighbours if interleaved else _turn_halves
    return turn(q, rotations[:, None]), turn(k, rotations[:, None])


def _turn_neighbours(x: Tensor, rotations: Tensor) -> Tensor:
    wide = x.float()
    pairs = torch.complex(wide[..., 0::2], wide[..., 1::2]) * rotations
    return torch.view_as_real(pairs).flatten(-2).to(x.dtype)


def _turn_halves(x: Tensor, rotations: Tensor) -> Tensor:
    pairs = torch.complex(*x.float().chunk(2, dim=-1)) * rotations
    return torch.cat((pairs.real, pairs.imag), dim=-1).to(x.dtype)


@triton.jit
def rotation_of(rotations, token, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """Returns cosine and sine [1, BLOCK_R / 2] of a token's angles; rotations [T, R/2, 2]."""
    pair = tl.arange(0, BLOCK_R // 2)
    inside = pair < R // 2
    rotation = rotations + token * R + 2 * pair
    cos = tl.load(rotation, inside, other=0.0)[None, :]
    sin = tl.load(rotation + 1, inside, other=0.0)[None, :]
    return cos, sin


@triton.jit
def rotate_rows(
    source,
    target,
    row_mask,
    cos,
    sin,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    inverse_scale=1.0,
    LARGEST: tl.constexpr = 0.0,
):
    """Rotates rows of R numbers from the pointers `source` [ROWS, 1] to `target`, by the cosine and sine of
    `rotation_of`. `inverse_scale` and LARGEST: see `kv_cache.fp8.stored`, if `target` is an FP8 cache."""
    pair = tl.arange(0, BLOCK_R // 2)[None, :]
    column = tl.arange(0, BLOCK_R)[None, :]
    pair_mask = row_mask & (pair < R // 2)
    if INTERLEAVED:  # one load and one store for both of a pair
        both = tl.load(source + column, row_mask & (column < R), other=0.0)
        dtype = both.dtype
        first, second = tl.split(tl.reshape(both, (ROWS, BLOCK_R // 2, 2)))
    else:
        first = tl.load(source + pair, pair_mask, other=0.0)
        second = tl.load(source + pair + R // 2, pair_mask, other=0.0)
        dtype = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    kept: tl.constexpr = target.dtype.element_ty
    real = stored((a * cos - b * sin).to(dtype), kept, inverse_scale, LARGEST)
    imaginary = stored((a * sin + b * cos).to(dtype), kept, inverse_scale, LARGEST)
    # Source and target may be the same memory, and several threads may load a number that one stores: all loads come first
    tl.debug_barrier()
    if INTERLEAVED:
        turned = tl.reshape(tl.join(real, imaginary), (ROWS, BLOCK_R))
        tl.store(target + column, turned, row_mask & (column < R))
    else:
        tl.store(target + pair, real, pair_mask)
        tl.store(target + pair + R // 2, imaginary, pair_mask)
