"""What a model is: its shapes and rules, read from the config.json of a Hugging Face folder.

Everything that could differ between checkpoints of the family is decided here, once, so that the
model file has no `if` about where a checkpoint comes from. What cannot be served is refused here
with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# architecture -> model_type, for configs that name only one of the two
ARCHITECTURES = {"DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3"}

DTYPES = ("float32", "bfloat16", "float16")


class ModelError(ValueError):
    """A model folder that cannot be served; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """Stretching of the rotary position embedding (Peng et al., 2023, arXiv:2309.00071)."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float | None  # None: from the mscales
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    dtype: str  # of the checkpoint, such as "bfloat16"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int  # of the dense layers
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    max_position_embeddings: int  # longest context in tokens, YaRN's stretch included
    num_mtp_layers: int  # multi-token prediction layers behind the last layer of the checkpoint
    # mla
    q_lora_rank: int | None  # None: queries are projected in one step
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    # moe
    num_dense_layers: int  # layers before the first with experts
    num_experts: int
    num_shared_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    scoring: Literal["softmax", "sigmoid"]
    selection_bias: bool  # a learned bias takes part in the choice of experts
    num_expert_groups: int
    top_expert_groups: int
    normalize_expert_weights: bool
    routed_scaling_factor: float
    # rope and yarn
    rope_theta: float
    rope_interleaved: bool
    yarn: YarnConfig | None

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Values that one token keeps in the KV cache of one layer: its latent and rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def read_config(folder: Path) -> ModelConfig:
    """The config of the model in `folder`. Raises ModelError."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: not a JSON object")
    try:
        return parse_config(raw)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: malformed: {error}") from error


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The config that a parsed config.json describes. Raises ModelError."""
    architecture, model_type = _architecture(raw)
    _refuse_unsupported(raw)
    yarn = _yarn(raw)
    max_position = _size(raw, "max_position_embeddings")
    if yarn is not None:
        max_position = max(max_position, int(yarn.original_max_position * yarn.factor))
    num_layers = _size(raw, "num_hidden_layers")
    experts = _optional_size(raw, "n_routed_experts") or 0
    config = ModelConfig(
        architecture=architecture,
        dtype=_dtype(raw),
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=_size(raw, "hidden_size"),
        num_layers=num_layers,
        num_heads=_size(raw, "num_attention_heads"),
        intermediate_size=_size(raw, "intermediate_size"),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        max_position_embeddings=max_position,
        num_mtp_layers=_optional_size(raw, "num_nextn_predict_layers")
        or _optional_size(raw, "num_mtp_layers")
        or 0,
        q_lora_rank=_optional_size(raw, "q_lora_rank"),
        kv_lora_rank=_size(raw, "kv_lora_rank"),
        qk_nope_head_dim=_size(raw, "qk_nope_head_dim"),
        qk_rope_head_dim=_size(raw, "qk_rope_head_dim"),
        v_head_dim=_size(raw, "v_head_dim"),
        num_dense_layers=(
            min(_optional_size(raw, "first_k_dense_replace") or 0, num_layers)
            if experts
            else num_layers
        ),
        num_experts=experts,
        num_shared_experts=_optional_size(raw, "n_shared_experts") or 0,
        experts_per_token=_size(raw, "num_experts_per_tok") if experts else 0,
        moe_intermediate_size=_size(raw, "moe_intermediate_size") if experts else 0,
        **_routing(raw, model_type),
        routed_scaling_factor=float(raw.get("routed_scaling_factor", 1.0)),
        rope_theta=float(_rope(raw).get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_interleaved=model_type == "deepseek_v2" or bool(raw.get("rope_interleave", True)),
        yarn=yarn,
    )
    _check_groups(config)
    return config


def _architecture(raw: Mapping[str, Any]) -> tuple[str, str]:
    named = (raw.get("architectures") or [None])[0]
    for architecture, model_type in ARCHITECTURES.items():
        if named == architecture or (named is None and raw.get("model_type") == model_type):
            return architecture, model_type
    found = named or raw.get("model_type") or "no architecture at all"
    raise ModelError(f"{found} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Options that change the arithmetic and that no published checkpoint of the family sets."""
    for name, default in (("hidden_act", "silu"), ("mlp_bias", False), ("moe_layer_freq", 1)):
        if raw.get(name, default) != default:
            raise ModelError(f"{name} {raw[name]!r} is not supported, only {default!r}")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise ModelError(f"quantization {method!r} is not supported, only plain weights")


def _dtype(raw: Mapping[str, Any]) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return str(name)


def _routing(raw: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    groups = {
        "num_expert_groups": raw.get("n_group") or 1,
        "top_expert_groups": raw.get("topk_group") or raw.get("n_group") or 1,
    }
    if model_type == "deepseek_v3":
        _expect(raw, "scoring_func", "sigmoid")
        _expect(raw, "topk_method", "noaux_tc")
        normalize = raw.get("norm_topk_prob", True)
        return dict(
            groups, scoring="sigmoid", selection_bias=True, normalize_expert_weights=normalize
        )
    _expect(raw, "scoring_func", "softmax")
    _expect(raw, "topk_method", "greedy", "group_limited_greedy")
    if raw.get("topk_method", "greedy") == "greedy":
        groups = {"num_expert_groups": 1, "top_expert_groups": 1}
    # V2's norm_topk_prob is false in every published checkpoint and ignored by transformers.
    return dict(groups, scoring="softmax", selection_bias=False, normalize_expert_weights=False)


def _check_groups(config: ModelConfig) -> None:
    if not config.num_experts:
        return
    size, rest = divmod(config.num_experts, config.num_expert_groups)
    reachable = size * min(config.top_expert_groups, config.num_expert_groups)
    if rest or config.experts_per_token > reachable or (config.selection_bias and size < 2):
        raise ModelError(
            f"cannot route each token to {config.experts_per_token} of {config.num_experts} "
            f"experts in {config.top_expert_groups} of {config.num_expert_groups} groups"
        )


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes `rope_parameters`, checkpoints on the hub have `rope_scaling`."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _yarn(raw: Mapping[str, Any]) -> YarnConfig | None:
    rope = _rope(raw)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ModelError(f"rope type {kind!r} is not supported; supported are default, yarn")
    max_position = _size(raw, "max_position_embeddings")
    original = rope.get("original_max_position_embeddings") or max_position
    return YarnConfig(
        factor=float(rope.get("factor") or max_position / original),
        original_max_position=original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=rope.get("attention_factor"),
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
        truncate=bool(rope.get("truncate", True)),
    )


def _size(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if value is None:
        raise ModelError(f"{name} is missing")
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{name} {value!r} is not a positive integer")
    return value


def _optional_size(raw: Mapping[str, Any], name: str) -> int | None:
    """None if absent, null or 0."""
    return _size(raw, name) if raw.get(name) else None


def _expect(raw: Mapping[str, Any], name: str, *values: str) -> None:
    if raw.get(name) not in (None, *values):
        raise ModelError(f"{name} {raw[name]!r} is not supported, only {' or '.join(values)}")
