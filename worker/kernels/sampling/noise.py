"""Noise as a pure function of (seed, position, token id).

A request's random sequence depends on nothing else: not on its batch, its slot or the number of workers. It can be
continued at any position.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Odd 64-bit constants (SplitMix64, Steele et al. 2014), also as signed integers for torch.
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GOLDEN, _MIX_1, _MIX_2 = (constant - (1 << 64) for constant in (GOLDEN, MIX_1, MIX_2))


def gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Returns standard Gumbel noise [R, V] float32 for rows of `seed` and `position`, [R] int64."""
    token = torch.arange(vocab_size, device=seed.device)
    row = _mix(_mix(seed) + position * _GOLDEN)
    bits = _mix(row[:, None] + token * _GOLDEN)
    # 23 bits and a half: never 0 or 1 in float32, whose logarithms would be infinite.
    uniform = ((_shift(bits, 41)).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """Returns SplitMix64's finalizer of x; multiplication of int64 wraps around."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
