"""Angles of the rotary position embedding, stretched to longer contexts as YaRN or Llama 3.1 do.

YaRN's formulas are those of its paper (Peng et al., 2023, arXiv:2309.00071, section 3) with
DeepSeek's two mscales. Angles are computed in float32 as everywhere else: at position 100,000 a
float64 angle would differ from the one that the checkpoint was trained with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_router.worker.model.config.rope import Llama3Config, RopeConfig, YarnConfig, yarn_mscale


def rotation_table(rope: RopeConfig, max_position: int) -> Tensor:
    """[max_position, rope.width / 2] complex64: m * e^(i * angle) for each position and pair, where
    m is YaRN's attention factor (1 without YaRN)."""
    frequencies = inverse_frequencies(rope)
    positions = torch.arange(max_position, dtype=torch.float32)
    angles = torch.outer(positions, frequencies.to(positions.device))
    return torch.polar(torch.full_like(angles, attention_factor(rope)), angles)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Radians per token of each pair, [rope.width / 2] float32."""
    exponents = torch.arange(0, rope.width, 2, dtype=torch.float32) / rope.width
    wavelengths = rope.theta**exponents
    match rope.scaling:
        case None:
            return 1.0 / wavelengths
        case YarnConfig():
            return _yarn(rope.scaling, wavelengths, rope.theta)
        case Llama3Config():
            return _llama3(rope.scaling, 1.0 / wavelengths)


def _yarn(yarn: YarnConfig, wavelengths: Tensor, theta: float) -> Tensor:
    """Leaves fast pairs alone (they turn often enough within the original context), slows slow ones
    down by `factor`, and blends between `beta_fast` and `beta_slow` turns, by the pair's index."""
    low, high = _blend_range(yarn, 2 * len(wavelengths), theta)
    pairs = torch.arange(len(wavelengths), dtype=torch.float32)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return (1.0 / (yarn.factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept


def _llama3(llama3: Llama3Config, frequencies: Tensor) -> Tensor:
    """The same idea, blended by how often a pair turns within the original context."""
    low, high = llama3.low_freq_factor, llama3.high_freq_factor
    turns = llama3.original_max_position / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / llama3.factor + kept * frequencies


def attention_factor(rope: RopeConfig) -> float:
    """What YaRN multiplies rotated queries and keys by; 1 without it."""
    yarn = rope.scaling
    if not isinstance(yarn, YarnConfig):
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_mscale(yarn, yarn.mscale) / yarn_mscale(yarn, yarn.mscale_all_dim)
    return yarn_mscale(yarn, 1.0)


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
