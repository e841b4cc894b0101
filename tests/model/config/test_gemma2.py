"""Gemma 2's config.json: the values of published checkpoints, and refused values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_router.worker.kv_cache.spec import bytes_per_token
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.gemma2 import Gemma2Config
from mla_router.worker.model.config.read import parse_config

# As on the hub, without fields that do not change the arithmetic.
GEMMA_2_9B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA_2_27B: dict[str, Any] = GEMMA_2_9B | {
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_hidden_layers": 46,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 144,
}


def parse(raw: dict[str, Any]) -> Gemma2Config:
    config = parse_config(raw)
    assert isinstance(config, Gemma2Config)
    return config


def test_gemma_2_9b() -> None:
    config = parse(GEMMA_2_9B)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (16, 8, 256)
    assert config.tie_word_embeddings  # no published config says so
    assert (config.rope.theta, config.rope.rotary_dim, config.rope.interleaved) == (1e4, 256, False)
    assert config.final_softcap == 30.0
    local, everywhere = config.attention_specs
    assert (local.window, everywhere.window) == (4096, None)
    assert [config.attention_index(layer) for layer in range(4)] == [0, 1, 0, 1]
    assert local.scale == everywhere.scale == 1 / 16
    assert local.softcap == everywhere.softcap == 50.0
    assert bytes_per_token(config.kv_cache_specs(torch.bfloat16)) == 336 << 10


def test_gemma_2_27b_has_a_scale_of_its_own() -> None:
    config = parse(GEMMA_2_27B)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 16, 128)
    assert config.attention_spec(0).scale == 1 / 12


def test_missing_fields_have_the_values_of_transformers() -> None:
    names = ("head_dim", "sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping")
    shorter = {name: value for name, value in GEMMA_2_9B.items() if name not in names}
    assert parse(shorter) == parse(GEMMA_2_9B)


def test_kinds_of_layers_that_transformers_5_writes() -> None:
    kinds = ["full_attention", "sliding_attention"] * 21
    config = parse(GEMMA_2_9B | {"layer_types": kinds})
    assert [config.attention_spec(layer).window for layer in range(3)] == [None, 4096, None]


def test_without_caps() -> None:
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = parse(GEMMA_2_9B | none)
    assert (config.softcap, config.final_softcap) == (None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 5}, "num_attention_heads 16 is not a multiple of 5 KV heads"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' .* only gelu_pytorch_tanh"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supp"),
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping 0 is not a number above 0"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"layer_types": ["chunked_attention"] * 42}, "layer_types .* of full_attention and sl"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear' is not supported"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(GEMMA_2_9B | change)
