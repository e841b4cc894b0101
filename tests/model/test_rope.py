"""Rotary angles and YaRN against the papers' formulas in float64, and transformers' buffers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    LlamaConfig,
    Qwen2Config,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.models.gemma2.modeling_gemma2 import Gemma2RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from mla_router.worker.model.config.read import parse_config
from mla_router.worker.model.config.rope import Llama3Config, RopeConfig, YarnConfig, softmax_scale
from mla_router.worker.model.rope import (
    attention_factor,
    inverse_frequencies,
    rotation_table,
)
from support.tiny_model import CONFIGS, raw_config

ROTARY: dict[str, tuple[Any, Any]] = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2RotaryEmbedding),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3RotaryEmbedding),
    "llama": (LlamaConfig, LlamaRotaryEmbedding),
    "qwen2": (Qwen2Config, Qwen2RotaryEmbedding),
    "gemma2": (Gemma2Config, Gemma2RotaryEmbedding),
}

V3_YARN = YarnConfig(40.0, 4096, 32.0, 1.0, None, 1.0, 1.0, True)
V2_LITE_YARN = replace(V3_YARN, mscale=0.707, mscale_all_dim=0.707)


def rope_with(scaling: YarnConfig | Llama3Config | None, theta: float = 10000.0) -> RopeConfig:
    return RopeConfig(theta, rotary_dim=64, interleaved=True, scaling=scaling)


def yarn_frequencies(yarn: YarnConfig, width: int, theta: float) -> np.ndarray:
    """Returns YaRN's frequencies by the paper. A pair that turns r times within the original context is kept for
    r > beta_fast, and slowed by the factor for r < beta_slow. Between them DeepSeek interpolates linearly in the pair's
    index, from the next lower to the next higher integer."""
    plain = theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)

    def index_of(turns: float) -> float:
        # plain[i] * original / (2 pi) = turns, solved for i
        return width / 2 * math.log(yarn.original_max_position / (2 * math.pi * turns), theta)

    low = max(math.floor(index_of(yarn.beta_fast)), 0)
    high = min(math.ceil(index_of(yarn.beta_slow)), width - 1)
    slowed = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
    return plain * (1 - slowed) + plain / yarn.factor * slowed


@pytest.mark.parametrize("yarn", [V3_YARN, V2_LITE_YARN, replace(V3_YARN, factor=4.0)])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_yarn_frequencies(yarn: YarnConfig, theta: float) -> None:
    got = inverse_frequencies(rope_with(yarn, theta)).double().numpy()
    np.testing.assert_allclose(got, yarn_frequencies(yarn, 64, theta), rtol=2e-6)


def test_yarn_with_equal_limits_blends_nothing() -> None:
    """717 turns are made at index -0.3: both limits are pair 0, which is kept, and all others are slowed."""
    yarn = replace(V3_YARN, beta_fast=717.0, beta_slow=717.0)
    got = inverse_frequencies(rope_with(yarn)).double().numpy()
    plain = 10000.0 ** -(np.arange(32) / 32)
    expected = np.where(np.arange(32) == 0, plain, plain / 40)
    np.testing.assert_allclose(got, expected, rtol=2e-6)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies(factor: float) -> None:
    """Returns frequencies by Meta's rule, pair by pair: wavelengths above original / low are multiplied by the factor,
    those below original / high are kept, and between them frequencies are interpolated."""
    original, low, high, theta = 8192, 1.0, 4.0, 500000.0
    expected = []
    for pair in range(32):
        frequency = theta ** (-pair / 32)
        wavelength = 2 * math.pi / frequency
        if wavelength > original / low:
            expected.append(frequency / factor)
        elif wavelength < original / high:
            expected.append(frequency)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    got = inverse_frequencies(rope_with(Llama3Config(factor, original, low, high), theta))
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=5e-6)


def test_plain_frequencies() -> None:
    got = inverse_frequencies(rope_with(None)).double().numpy()
    np.testing.assert_allclose(got, 10000.0 ** -(np.arange(32) / 32), rtol=1e-6)


def test_table_turns_each_pair_by_position_times_frequency() -> None:
    table = rotation_table(rope_with(replace(V3_YARN, mscale=0.5)), 512)
    assert table.shape == (512, 32)
    assert table.dtype == torch.complex64
    angles = np.outer(np.arange(512), yarn_frequencies(V3_YARN, 64, 10000.0))
    size = (0.05 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    np.testing.assert_allclose(table.numpy(), size * np.exp(1j * angles), atol=1e-4)


@pytest.mark.parametrize(
    ("mscale", "all_dim", "explicit", "expected"),
    [
        (1.0, 1.0, None, 1.0),
        (0.707, 0.707, None, 1.0),
        (1.0, 0.5, None, (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)),
        (None, None, None, 0.1 * math.log(40) + 1),
        (1.0, 1.0, 1.25, 1.25),
    ],
)
def test_attention_factor(
    mscale: float | None, all_dim: float | None, explicit: float | None, expected: float
) -> None:
    yarn = replace(V3_YARN, mscale=mscale, mscale_all_dim=all_dim, attention_factor=explicit)
    assert attention_factor(rope_with(yarn)) == pytest.approx(expected, rel=1e-12)
    assert attention_factor(rope_with(None)) == 1.0


def test_softmax_scale_of_the_published_models() -> None:
    # mscale^2 / sqrt(192): 0.1 * ln(40) + 1 = 1.36889; times 0.707: 1.26080
    assert softmax_scale(192, rope_with(V3_YARN)) == pytest.approx(0.135234, abs=1e-6)
    assert softmax_scale(192, rope_with(V2_LITE_YARN)) == pytest.approx(0.114721, abs=1e-6)
    assert softmax_scale(192, rope_with(None)) == pytest.approx(192**-0.5)
    assert softmax_scale(192, rope_with(replace(V3_YARN, mscale_all_dim=None))) == 192**-0.5


@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_are_bit_for_bit_those_of_transformers(name: str) -> None:
    raw = raw_config(CONFIGS[name])
    values = {key: value for key, value in raw.items() if key != "model_type"}
    config_class, embedding_class = ROTARY[raw["model_type"]]
    reference = embedding_class(config_class(**values))
    rope = parse_config(raw).rope
    assert torch.equal(inverse_frequencies(rope), reference.inv_freq)
    assert attention_factor(rope) == reference.attention_scaling
