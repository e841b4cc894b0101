"""The config.json of Llama: 1 to 3.2's text models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_router.worker.model.config.attention_spec import GroupedQueryAttentionSpec
from mla_router.worker.model.config.base import ModelConfig, common_fields
from mla_router.worker.model.config.fields import ModelError, expect, optional_size
from mla_router.worker.model.config.rope import read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    num_kv_heads: int
    head_dim: int
    output_bias: bool  # of o_proj; `attention_bias`: of the projections before attention
    mlp_bias: bool

    def attention_spec(self, layer: int) -> GroupedQueryAttentionSpec:
        del layer
        return self.grouped_query_spec()

    def grouped_query_spec(self, *, window: int | None = None) -> GroupedQueryAttentionSpec:
        return GroupedQueryAttentionSpec(
            num_heads=self.num_heads,
            scale=self.head_dim**-0.5,
            window=window,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
        )


def parse_llama(raw: Mapping[str, Any]) -> LlamaConfig:
    """Raises ModelError."""
    # Models that are called Llama, but compute something else, set these
    expect(raw, "hidden_act", "silu")
    expect(raw, "sliding_window")
    expect(raw, "partial_rotary_factor", 1)
    common = common_fields(raw)
    heads = grouped_query_fields(raw, common)
    return LlamaConfig(
        **common,
        **heads,
        architecture="LlamaForCausalLM",
        rope=read_rope(
            raw, rotary_dim=heads["head_dim"], interleaved=False, types=("default", "llama3")
        ),
        output_bias=common["attention_bias"],
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def grouped_query_fields(raw: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of grouped-query attention in `raw`, whose `common_fields` are `common`. Raises ModelError."""
    heads = common["num_heads"]
    kv_heads = optional_size(raw, "num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is not a multiple of {kv_heads} KV heads")
    head_dim = optional_size(raw, "head_dim") or common["hidden_size"] // heads
    if not head_dim:
        raise ModelError(f"hidden_size {common['hidden_size']} is less than {heads} heads")
    return {"num_kv_heads": kv_heads, "head_dim": head_dim}
