"""Angles of the rotary position embedding, with YaRN's stretch to longer contexts.

The formulas are YaRN's (Peng et al., 2023, arXiv:2309.00071, section 3) with DeepSeek's two
mscales. Angles are computed in float32 as everywhere else: at position 100,000 a float64 angle
would differ from the one that the checkpoint was trained with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_router.worker.model.config import ModelConfig, YarnConfig


def rotation_table(config: ModelConfig) -> Tensor:
    """[max_position_embeddings, qk_rope_head_dim / 2] complex64: m * e^(i * angle) for each
    position and pair, where m is YaRN's attention factor (1 without YaRN)."""
    frequencies = inverse_frequencies(config)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies.to(positions.device))
    return torch.polar(torch.full_like(angles, attention_factor(config.yarn)), angles)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per token of each pair, [qk_rope_head_dim / 2] float32.

    YaRN leaves fast pairs alone (they turn often enough within the original context), slows slow
    ones down by `factor`, and blends between `beta_fast` and `beta_slow` turns.
    """
    width, yarn = config.qk_rope_head_dim, config.yarn
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    wavelengths = config.rope_theta**exponents
    if yarn is None:
        return 1.0 / wavelengths
    low, high = _blend_range(yarn, width, config.rope_theta)
    pairs = torch.arange(width // 2, dtype=torch.float32)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return (1.0 / (yarn.factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept


def attention_factor(yarn: YarnConfig | None) -> float:
    """What YaRN multiplies rotated queries and keys by."""
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn, yarn.mscale) / _mscale(yarn, yarn.mscale_all_dim)
    return _mscale(yarn, 1.0)


def softmax_scale(config: ModelConfig) -> float:
    """What attention scores are multiplied by: 1 / sqrt(head width), and with DeepSeek's
    mscale_all_dim its square on top, for queries and keys both."""
    scale = float(config.qk_head_dim**-0.5)
    if config.yarn is not None and config.yarn.mscale_all_dim:
        scale *= _mscale(config.yarn, config.yarn.mscale_all_dim) ** 2
    return scale


def _mscale(yarn: YarnConfig, weight: float) -> float:
    return 1.0 if yarn.factor <= 1 else 0.1 * weight * math.log(yarn.factor) + 1.0


def _blend_range(yarn: YarnConfig, width: int, theta: float) -> tuple[float, float]:
    """The pairs that make `beta_fast` and `beta_slow` turns within the original context."""

    def pair_with(turns: float) -> float:
        wavelength = yarn.original_max_position / (turns * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    return low, high + 0.001 if low == high else high
