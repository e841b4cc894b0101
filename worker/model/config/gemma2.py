"""The config.json of Gemma 2: 2B, 9B and 27B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mla_router.worker.model.config.attention_spec import GroupedQueryAttentionSpec
from mla_router.worker.model.config.base import common_fields
from mla_router.worker.model.config.fields import expect, number, size
from mla_router.worker.model.config.layer_types import FULL, SLIDING, read_windows
from mla_router.worker.model.config.llama import LlamaConfig, grouped_query_fields
from mla_router.worker.model.config.rope import read_rope

# The published configs leave out some fields, whose values are then those of transformers
DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(LlamaConfig):
    windows: tuple[int | None, ...]  # of each layer, in tokens; None: all tokens
    scale: float  # of attention scores
    softcap: float | None  # of attention scores
    final_softcap: float | None  # of logits

    def attention_spec(self, layer: int) -> GroupedQueryAttentionSpec:
        spec = self.grouped_query_spec(window=self.windows[layer])
        return replace(spec, scale=self.scale, softcap=self.softcap)


def parse_gemma2(raw: Mapping[str, Any]) -> Gemma2Config:
    """Raises ModelError."""
    raw = {**DEFAULTS, **raw}
    for name in ("hidden_act", "hidden_activation"):
        expect(raw, name, "gelu_pytorch_tanh")
    expect(raw, "use_bidirectional_attention", False)
    common = common_fields(raw)
    heads = grouped_query_fields(raw, common)
    # Every other layer, from the first on
    interleaved = [FULL if layer % 2 else SLIDING for layer in range(common["num_layers"])]
    return Gemma2Config(
        **common,
        **heads,
        architecture="Gemma2ForCausalLM",
        rope=read_rope(raw, rotary_dim=heads["head_dim"], interleaved=False, types=("default",)),
        output_bias=common["attention_bias"],
        mlp_bias=False,
        windows=read_windows(raw, interleaved),
        scale=size(raw, "query_pre_attn_scalar") ** -0.5,
        softcap=_softcap(raw, "attn_logit_softcapping"),
        final_softcap=_softcap(raw, "final_logit_softcapping"),
    )


def _softcap(raw: Mapping[str, Any], name: str) -> float | None:
    return None if raw[name] is None else number(raw, name)
