"""Rotary position embedding, as `rotary` has it, in the kernels that do it on their way."""

from __future__ import annotations

import triton
import triton.language as tl


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
):
    """From rows of R numbers at the pointers `source` [ROWS, 1] to those at `target`."""
    pair = tl.arange(0, BLOCK_R // 2)[None, :]
    column = tl.arange(0, BLOCK_R)[None, :]
    pair_mask = row_mask & (pair < R // 2)
    if INTERLEAVED:  # neighbours come and go together
        both = tl.load(source + column, row_mask & (column < R), other=0.0)
        dtype = both.dtype
        first, second = tl.split(tl.reshape(both, (ROWS, BLOCK_R // 2, 2)))
    else:
        first = tl.load(source + pair, pair_mask, other=0.0)
        second = tl.load(source + pair + R // 2, pair_mask, other=0.0)
        dtype = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    real = (a * cos - b * sin).to(dtype).to(target.dtype.element_ty)
    imaginary = (a * sin + b * cos).to(dtype).to(target.dtype.element_ty)
    # Source and target may be the same memory, and threads without work of their own load what others
    # store: they do so before.
    tl.debug_barrier()
    if INTERLEAVED:
        turned = tl.reshape(tl.join(real, imaginary), (ROWS, BLOCK_R))
        tl.store(target + column, turned, row_mask & (column < R))
    else:
        tl.store(target + pair, real, pair_mask)
        tl.store(target + pair + R // 2, imaginary, pair_mask)
