"""The config.json of Qwen2 and Qwen2.5: Llama with biases of queries, keys and values.

With `use_sliding_window` the layers from `max_window_layers` on attend to a window of the last `sliding_window` tokens.
transformers 5 writes the kind of each layer (`layer_types`) as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_router.worker.model.config.attention_spec import GroupedQueryAttentionSpec
from mla_router.worker.model.config.base import common_fields
from mla_router.worker.model.config.fields import expect, optional_size
from mla_router.worker.model.config.layer_types import FULL, SLIDING, read_windows
from mla_router.worker.model.config.llama import LlamaConfig, grouped_query_fields
from mla_router.worker.model.config.rope import read_rope, with_yarn


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Config(LlamaConfig):
    windows: tuple[int | None, ...]  # of each layer, in tokens; None: all tokens

    def attention_spec(self, layer: int) -> GroupedQueryAttentionSpec:
        return self.grouped_query_spec(window=self.windows[layer])


def parse_qwen2(raw: Mapping[str, Any]) -> Qwen2Config:
    """Raises ModelError."""
    expect(raw, "hidden_act", "silu")
    common = common_fields(raw)
    heads = grouped_query_fields(raw, common)
    rope = read_rope(
        raw, rotary_dim=heads["head_dim"], interleaved=False, types=("default", "yarn")
    )
    common |= {
        "attention_bias": True,
        "max_position_embeddings": with_yarn(common["max_position_embeddings"], rope),
    }
    return Qwen2Config(
        **common,
        **heads,
        architecture="Qwen2ForCausalLM",
        rope=rope,
        output_bias=False,
        mlp_bias=False,
        windows=_windows(raw, common["num_layers"]),
    )


def _windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    if not raw.get("use_sliding_window"):
        return (None,) * num_layers
    first = optional_size(raw, "max_window_layers") or 0
    default = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return read_windows(raw, default)
