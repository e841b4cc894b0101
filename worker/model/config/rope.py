"""The rotary position embedding of a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_router.worker.model.config.fields import ModelError, size


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
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    return RopeConfig(theta, rotary_dim, interleaved, scaling)


def _parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the parameters: transformers 5 writes `rope_parameters`, checkpoints on the hub have `rope_scaling`."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _yarn(rope: Mapping[str, Any], max_position: int) -> YarnConfig:
    original = rope.get("original_max_position_embeddings") or max_position
    return YarnConfig(
        factor=float(rope.get("factor") or max_position / original),
        original_max_position=original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=_optional_number(rope, "attention_factor"),
        mscale=_optional_number(rope, "mscale"),
        mscale_all_dim=_optional_number(rope, "mscale_all_dim"),
        truncate=bool(rope.get("truncate", True)),
    )


def _optional_number(rope: Mapping[str, Any], name: str) -> float | None:
    value = rope.get(name)
    return None if value is None else float(value)


def _llama3(rope: Mapping[str, Any]) -> Llama3Config:
    values = {}
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        if name not in rope:
            raise ModelError(f"rope_scaling: {name} is missing")
        values[name] = float(rope[name])
    if not 0 < values["low_freq_factor"] < values["high_freq_factor"] or values["factor"] <= 0:
        raise ModelError(
            "rope_scaling: not 0 < low_freq_factor < high_freq_factor and 0 < factor: "
            + ", ".join(f"{name} {value:g}" for name, value in values.items())
        )
    original = size(rope, "original_max_position_embeddings")
    return Llama3Config(original_max_position=original, **values)


def with_yarn(max_position_embeddings: int, rope: RopeConfig) -> int:
    """Returns the longest context in tokens: a config's `max_position_embeddings` may not include YaRN's factor."""
    if not isinstance(rope.scaling, YarnConfig):
        return max_position_embeddings
    return max(
        max_position_embeddings, int(rope.scaling.original_max_position * rope.scaling.factor)
    )


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
