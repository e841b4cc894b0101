"""Rotary embedding by its formula, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def turned(x: Tensor, angles: Tensor, *, interleaved: bool) -> Tensor:
    """Returns each pair of `x` [T, H, R] as a complex number times e^(i * angle), float64; angles [T, R/2]."""
    wide = x.double()
    half = x.shape[-1] // 2
    pairs = wide.unflatten(-1, (half, 2)) if interleaved else wide.unflatten(-1, (2, half)).mT
    product = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.exp(1j * angles)[:, None]
    parts = torch.view_as_real(product)
    return parts.flatten(-2) if interleaved else parts.mT.flatten(-2)
