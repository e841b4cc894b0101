"""Noise that is computed, not drawn: a pure function of (seed, position, token id).

A request's random sequence therefore depends on nothing else, not on its batch, its slot or the
number of workers, and it can be taken up again at any position.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Odd 64-bit constants (SplitMix64, Steele et al. 2014), and as the signed integers torch has.
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GOLDEN, _MIX_1, _MIX_2 = (constant - (1 << 64) for constant in (GOLDEN, MIX_1, MIX_2))


def gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """[R, V] float32 standard Gumbel noise for rows of `seed` and `position`, [R] int64."""
    token = torch.arange(vocab_size, device=seed.device)
    row = _mix(_mix(seed) + position * _GOLDEN)
    bits = _mix(row[:, None] + token * _GOLDEN)
    # 23 bits and a half: never 0 or 1 in float32, where the logarithms would be infinite.
    uniform = ((_shift(bits, 41)).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer; multiplication of int64 wraps around."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
