"""Angles of the rotary position embedding, with the context extensions of YaRN and Llama 3.1.

YaRN's formulas are from its paper (Peng et al., 2023, arXiv:2309.00071, section 3), with
DeepSeek's two mscales. Angles are computed in float32, as in training: at position 100,000 a
float64 angle would differ.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_router.worker.model.config.rope import Llama3Config, RopeConfig, YarnConfig, yarn_mscale


def rotation_table(rope: RopeConfig, max_position: int) -> Tensor:
    """Returns m * e^(i * angle) for each position and pair, [max_position, rope.rotary_dim / 2] complex64. m is
    YaRN's attention factor (1 without YaRN)."""
    frequencies = inverse_frequencies(rope)
    positions = torch.arange(max_position, dtype=torch.float32)
    angles = torch.outer(positions, frequencies.to(positions.device))
    return torch.polar(torch.full_like(angles, attention_factor(rope)), angles)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Returns radians per token of each pair, [rope.rotary_dim / 2] float32."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    wavelengths = rope.theta**exponents
    match rope.scaling:
        case None:
            return 1.0 / wavelengths
        case YarnConfig():
            return _yarn(rope.scaling, wavelengths, rope.theta)
        case Llama3Config():
            return _llama3(rope.scaling, 1.0 / wavelengths)


def _yarn(yarn: YarnConfig, wavelengths: Tensor, theta: float) -> Tensor:
    """Keeps fast pairs, which turn often within the original context, and slows slow pairs down by `factor`. Pairs
    between `beta_fast` and `beta_slow` turns are interpolated by their index."""
    low, high = _blend_range(yarn, 2 * len(wavelengths), theta)
    pairs = torch.arange(len(wavelengths), dtype=torch.float32)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return (1.0 / (yarn.factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept


def _llama3(llama3: Llama3Config, frequencies: Tensor) -> Tensor:
    """Keeps fast pairs and slows slow pairs down, as YaRN does. Pairs between are interpolated by their turns within
    the original context."""
    low, high = llama3.low_freq_factor, llama3.high_freq_factor
    turns = llama3.original_max_position / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / llama3.factor + kept * frequencies


def attention_factor(rope: RopeConfig) -> float:
    """Returns YaRN's factor on rotated queries and keys; 1 without YaRN."""
    yarn = rope.scaling
    if not isinstance(yarn, YarnConfig):
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_mscale(yarn, yarn.mscale) / yarn_mscale(yarn, yarn.mscale_all_dim)
    return yarn_mscale(yarn, 1.0)


def _blend_range(yarn: YarnConfig, rotary_dim: int, theta: float) -> tuple[float, float]:
    """Returns the indices of the pairs that make `beta_fast` and `beta_slow` turns within the original context."""

    def pair_with(turns: float) -> float:
        wavelength = yarn.original_max_position / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    return low, high + 0.001 if low == high else high
