"""Numbers of an FP8 KV cache as float16, for the products of decode attention.

Kernels read two neighbouring numbers as one 16-bit word: tensor cores take words of 16 bits from shared memory in either
orientation, but bytes in one only. Words are converted in registers, to float16, which has all numbers of both formats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

LARGEST = tl.constexpr(65504.0)  # of float16


def exponent_bits(dtype: torch.dtype) -> int:
    """Returns the bits of the exponent of a cache's FP8 format: its name in kernels. 0 for other dtypes."""
    return {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}.get(dtype, 0)


def as_words(cache: Tensor) -> Tensor:
    """Returns a view of an FP8 cache [..., W] as words [..., W / 2], and any other cache itself."""
    return cache.view(torch.uint16) if exponent_bits(cache.dtype) else cache


@triton.jit
def load_tiles(elements, mask, FP8: tl.constexpr):
    """Returns the numbers at the pointers `elements` to a cache, 0 outside of `mask`: one tile, or for FP8
    (`exponent_bits`) two, with the first and with the second number of each word."""
    loaded = tl.load(elements, mask=mask, other=0)
    tiles = tl.tuple((loaded,))
    if FP8:
        tiles = _pairs_of(loaded, FP8)
    return tiles


@triton.jit
def _pairs_of(words, FP8: tl.constexpr):
    if not cuda_capability_geq(8, 0):  # the interpreter has no assembly
        kind: tl.constexpr = tl.float8e4nv if FP8 == 4 else tl.float8e5
        first, second = (words & 0xFF).to(tl.uint8), (words >> 8).to(tl.uint8)
        first = first.to(kind, bitcast=True).to(tl.float16)
        pairs = first, second.to(kind, bitcast=True).to(tl.float16)
    elif FP8 == 4:  # a register has two words
        pairs = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            .reg .b32 of_low, of_high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 of_low, low;
            cvt.rn.f16x2.e4m3x2 of_high, high;
            prmt.b32 $0, of_low, of_high, 0x5410;
            prmt.b32 $1, of_low, of_high, 0x7632;
            }
            """,
            "=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:  # E5M2 is the upper half of float16
        pairs = tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $2, 0, 0x2404;
            and.b32 $1, $2, 0xff00ff00;
            """,
            "=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return pairs


@triton.jit
def operand(x, FP8: tl.constexpr):
    """Returns `x` in the dtype of the products: with FP8 float16, whose range is smaller than bfloat16's."""
    if FP8:
        x = x.to(tl.float32)
        x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return x
