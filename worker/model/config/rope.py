"""The rotary position embedding of a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_router.worker.model.config.fields import (
    MAX_SIZE,
    ModelError,
    number,
    optional_number,
    optional_size,
    size,
)


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """YaRN's context extension (Peng et al., 2023, arXiv:2309.00071)."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float | None  # None: from the mscales
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool


@dataclass(frozen=True, slots=True)
class Llama3Config:
    """Llama 3.1's context extension (`apply_scaling` in models/llama3/model.py of
    https://github.com/meta-llama/llama-models)."""

    factor: float
    original_max_position: int
    # A pair with at most this many turns within the original context is slowed down
    low_freq_factor: float
    high_freq_factor: float  # a pair with at least this many turns stays as it is


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    rotary_dim: int  # values of a head that are rotated
    interleaved: bool  # a pair is two neighbours; otherwise i and i + rotary_dim / 2
    scaling: YarnConfig | Llama3Config | None


def read_rope(
    raw: Mapping[str, Any], *, rotary_dim: int, interleaved: bool, types: tuple[str, ...]
) -> RopeConfig:
    """Returns the rotary embedding of `raw`, whose type must be one of `types`. Raises ModelError."""
    if rotary_dim % 2:
        raise ModelError(
            f"an odd number of values of a head, {rotary_dim}, cannot be rotated in pairs"
        )
    rope = _parameters(raw)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in types:
        raise ModelError(
            f"rope_scaling: rope type {kind!r} is not supported; supported are {', '.join(types)}"
        )
    scaling: YarnConfig | Llama3Config | None = None
    if kind == "yarn":
        scaling = _yarn(rope, size(raw, "max_position_embeddings"))
    elif kind == "llama3":
        scaling = _llama3(rope)
    theta = _theta(rope) or _theta(raw) or 10000.0
    return RopeConfig(theta, rotary_dim, interleaved, scaling)


def _parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the parameters: transformers 5 writes `rope_parameters`, checkpoints on the hub have `rope_scaling`."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _theta(fields: Mapping[str, Any]) -> float | None:
    """Returns the base of the wavelengths, whose logarithm is a divisor; None if it is absent. Long contexts have bases above
    1e10."""
    return optional_number(fields, "rope_theta", above=1.0, most=1e12)


def _yarn(rope: Mapping[str, Any], max_position: int) -> YarnConfig:
    fixed = rope.get("attention_factor")
    original = optional_size(rope, "original_max_position_embeddings") or max_position
    return YarnConfig(
        factor=optional_number(rope, "factor") or max_position / original,
        original_max_position=original,
        beta_fast=optional_number(rope, "beta_fast") or 32.0,
        beta_slow=optional_number(rope, "beta_slow") or 1.0,
        attention_factor=None if fixed is None else number(rope, "attention_factor"),
        mscale=optional_number(rope, "mscale"),
        mscale_all_dim=optional_number(rope, "mscale_all_dim"),
        truncate=bool(rope.get("truncate", True)),
    )


def _llama3(rope: Mapping[str, Any]) -> Llama3Config:
    low, high = number(rope, "low_freq_factor"), number(rope, "high_freq_factor")
    if low >= high:
        raise ModelError(f"low_freq_factor {low:g} is not less than high_freq_factor {high:g}")
    original = size(rope, "original_max_position_embeddings")
    return Llama3Config(number(rope, "factor"), original, low, high)


def with_yarn(max_position_embeddings: int, rope: RopeConfig) -> int:
    """Returns the longest context in tokens: a config's `max_position_embeddings` may not include YaRN's factor. Raises
    ModelError."""
    if not isinstance(yarn := rope.scaling, YarnConfig):
        return max_position_embeddings
    length = max(max_position_embeddings, int(yarn.original_max_position * yarn.factor))
    if length > MAX_SIZE:
        raise ModelError(f"factor {yarn.factor:g} makes a context of more than {MAX_SIZE} tokens")
    return length


def softmax_scale(head_dim: int, rope: RopeConfig) -> float:
    """Returns the factor of DeepSeek's attention scores: 1 / sqrt(head_dim), times the square of the factor of
    mscale_all_dim if it is set, once for queries and once for keys."""
    scale = float(head_dim**-0.5)
    if isinstance(rope.scaling, YarnConfig) and rope.scaling.mscale_all_dim:
        scale *= yarn_mscale(rope.scaling, rope.scaling.mscale_all_dim) ** 2
    return scale


def yarn_mscale(yarn: YarnConfig, weight: float) -> float:
    """Returns YaRN's 0.1 * weight * ln(factor) + 1; 1 if the factor is at most 1."""
    return 1.0 if yarn.factor <= 1 else 0.1 * weight * math.log(yarn.factor) + 1.0
