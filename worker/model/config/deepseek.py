"""The config.json of DeepSeek-V2 and V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mla_router.worker.model.config.attention_spec import (
    AttentionSpec,
    GroupedQueryAttentionSpec,
    LatentAttentionSpec,
)
from mla_router.worker.model.config.base import ModelConfig, common_fields
from mla_router.worker.model.config.fields import (
    ModelError,
    expect,
    number,
    optional_size,
    size,
)
from mla_router.worker.model.config.rope import read_rope, softmax_scale, with_yarn


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    # mla
    q_lora_rank: int | None  # None: queries have one projection
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    # moe
    num_dense_layers: int  # layers before the first layer with experts
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
    # --disable-mla, not a field of config.json: the KV cache keeps keys and values of all heads
    disable_mla: bool = False
    # --mla-bmm-dtype
    mla_bmm_dtype: str = "auto"

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def attention_spec(self, layer: int) -> AttentionSpec:
        del layer
        scale = softmax_scale(self.qk_head_dim, self.rope)
        if self.disable_mla:
            return GroupedQueryAttentionSpec(
                num_heads=self.num_heads,
                scale=scale,
                num_kv_heads=self.num_heads,
                head_dim=self.qk_head_dim,
                v_head_dim=self.v_head_dim,
            )
        return LatentAttentionSpec(
            num_heads=self.num_heads,
            scale=scale,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )


def parse_v2(raw: Mapping[str, Any]) -> DeepseekConfig:
    """Raises ModelError."""
    expect(raw, "scoring_func", "softmax")
    expect(raw, "topk_method", "greedy", "group_limited_greedy")
    grouped = raw.get("topk_method") == "group_limited_greedy"
    return _parse(
        raw,
        architecture="DeepseekV2ForCausalLM",
        interleaved=True,
        scoring="softmax",
        selection_bias=False,
        num_expert_groups=(optional_size(raw, "n_group") or 1) if grouped else 1,
        top_expert_groups=_top_groups(raw) if grouped else 1,
        # V2's norm_topk_prob is false in every published checkpoint and ignored by transformers.
        normalize_expert_weights=False,
    )


def parse_v3(raw: Mapping[str, Any]) -> DeepseekConfig:
    """Raises ModelError."""
    expect(raw, "scoring_func", "sigmoid")
    expect(raw, "topk_method", "noaux_tc")
    return _parse(
        raw,
        architecture="DeepseekV3ForCausalLM",
        interleaved=bool(raw.get("rope_interleave", True)),
        scoring="sigmoid",
        selection_bias=True,
        num_expert_groups=optional_size(raw, "n_group") or 1,
        top_expert_groups=_top_groups(raw),
        normalize_expert_weights=raw.get("norm_topk_prob", True),
    )


def _parse(raw: Mapping[str, Any], *, interleaved: bool, **rules: Any) -> DeepseekConfig:
    # Fields that change the arithmetic, and that no published checkpoint of the family sets
    expect(raw, "hidden_act", "silu")
    expect(raw, "mlp_bias", False)
    expect(raw, "moe_layer_freq", 1)
    common = common_fields(raw)
    rope = read_rope(
        raw,
        rotary_dim=size(raw, "qk_rope_head_dim"),
        interleaved=interleaved,
        types=("default", "yarn"),
    )
    common["max_position_embeddings"] = with_yarn(common["max_position_embeddings"], rope)
    experts = optional_size(raw, "n_routed_experts") or 0
    config = DeepseekConfig(
        **common,
        **rules,
        rope=rope,
        num_mtp_layers=optional_size(raw, "num_nextn_predict_layers")
        or optional_size(raw, "num_mtp_layers")
        or 0,
        q_lora_rank=optional_size(raw, "q_lora_rank"),
        kv_lora_rank=size(raw, "kv_lora_rank"),
        qk_nope_head_dim=size(raw, "qk_nope_head_dim"),
        qk_rope_head_dim=rope.rotary_dim,
        v_head_dim=size(raw, "v_head_dim"),
        num_dense_layers=optional_size(raw, "first_k_dense_replace") or 0,
        num_experts=experts,
        num_shared_experts=optional_size(raw, "n_shared_experts") or 0,
        experts_per_token=size(raw, "num_experts_per_tok") if experts else 0,
        moe_intermediate_size=size(raw, "moe_intermediate_size") if experts else 0,
        routed_scaling_factor=number(raw, "routed_scaling_factor", 1.0),
    )
    _check_groups(config)
    return config


def _top_groups(raw: Mapping[str, Any]) -> int:
    return optional_size(raw, "topk_group") or optional_size(raw, "n_group") or 1


def _check_groups(config: DeepseekConfig) -> None:
    if not config.num_experts:
        return
    if config.top_expert_groups > config.num_expert_groups:
        raise ModelError(
            f"topk_group {config.top_expert_groups} is more than n_group {config.num_expert_groups}"
        )
    group, rest = divmod(config.num_experts, config.num_expert_groups)
    reachable = group * config.top_expert_groups
    if rest or config.experts_per_token > reachable or (config.selection_bias and group < 2):
        raise ModelError(
            f"cannot route each token to {config.experts_per_token} of {config.num_experts} "
            f"experts in {config.top_expert_groups} of {config.num_expert_groups} groups"
        )
