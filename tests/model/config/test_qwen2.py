"""Qwen2's config.json: the values of published checkpoints, windows, and refused values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_router.worker.kv_cache.spec import bytes_per_token
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.qwen2 import Qwen2Config
from mla_router.worker.model.config.read import parse_config

# As on the hub, without fields that do not change the arithmetic.
QWEN2_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 28,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SLIDING = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}


def parse(**changes: Any) -> Qwen2Config:
    config = parse_config(QWEN2_7B | changes)
    assert isinstance(config, Qwen2Config)
    return config


def windows(config: Qwen2Config) -> list[int | None]:
    return [config.attention_spec(layer).window for layer in range(config.num_layers)]


def test_qwen2_7b() -> None:
    config = parse()
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (28, 4, 128)
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, False, False)
    assert (config.rope.theta, config.rope.scaling) == (1000000.0, None)
    assert bytes_per_token(config.kv_cache_specs(torch.bfloat16)) == 56 << 10


def test_a_window_that_is_not_used_is_none() -> None:
    assert windows(parse()) == [None] * 28
    assert len(parse().attention_specs) == 1


def test_windows_begin_at_a_layer() -> None:
    assert windows(parse(**SLIDING)) == [None] * 20 + [4096] * 8
    assert windows(parse(**SLIDING | {"max_window_layers": 0})) == [4096] * 28
    kinds = ["sliding_attention", "full_attention"] * 14
    assert windows(parse(**SLIDING, layer_types=kinds)) == [4096, None] * 14


def test_yarn_makes_the_context_longer() -> None:
    """The config of Qwen2.5 has the context before YaRN."""
    assert parse(rope_scaling=YARN).max_position_embeddings == 131072


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 5}, "num_attention_heads 28 is not a multiple of 5 KV heads"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only silu"),
        ({"use_sliding_window": True, "sliding_window": None}, "sliding_window is missing"),
        (SLIDING | {"layer_types": ["full_attention"]}, "layer_types .* are not 28 of full_atten"),
        ({"rope_scaling": {"type": "mrope"}}, "rope type 'mrope' is not supported; .* default, y"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(QWEN2_7B | change)
