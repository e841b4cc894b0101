"""Root mean square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis.

    x [..., N] and weight [N] of one dtype; the result has x's shape and dtype. The mean and the
    division are in float32, rounded to x's dtype before the weight is applied: checkpoints are
    trained and compared that way.
    """
    assert x.shape[-1:] == weight.shape, f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * inverse_rms).to(x.dtype)
