"""Llama's config.json: the values of published checkpoints, and refused values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_router.worker.kv_cache.spec import HeadsSpec, bytes_per_token
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.llama import LlamaConfig
from mla_router.worker.model.config.read import parse_config
from mla_router.worker.model.config.rope import Llama3Config

# As on the hub, without fields that do not change the arithmetic.
LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "pretraining_tp": 1,
}
SCALING: dict[str, Any] = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_3_2_1B: dict[str, Any] = LLAMA_3_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "rope_scaling": SCALING,
}


def parse(raw: dict[str, Any]) -> LlamaConfig:
    config = parse_config(raw)
    assert isinstance(config, LlamaConfig)
    return config


def test_llama_3_8b() -> None:
    config = parse(LLAMA_3_8B)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert (config.rope.theta, config.rope.rotary_dim, config.rope.scaling) == (500000.0, 128, None)
    assert not config.rope.interleaved
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-5, False)
    specs = config.kv_cache_specs(torch.bfloat16)
    heads = HeadsSpec(dtype=torch.bfloat16, num_kv_heads=8, head_dim=128, v_head_dim=128)
    assert specs == (heads,) * 32
    assert bytes_per_token(specs) == 128 << 10


def test_llama_3_2_1b() -> None:
    config = parse(LLAMA_3_2_1B)
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (16, 8, 64)
    assert config.tie_word_embeddings
    # max_position_embeddings includes the scaling.
    assert config.max_position_embeddings == 131072
    assert config.rope.scaling == Llama3Config(32.0, 8192, 1.0, 4.0)


def test_rope_parameters_of_transformers_5_mean_the_same_as_rope_scaling() -> None:
    new = {k: v for k, v in LLAMA_3_2_1B.items() if k not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = SCALING | {"rope_theta": 500000.0}
    assert parse(new) == parse(LLAMA_3_2_1B)


def test_missing_fields_mean_multi_head_attention() -> None:
    config = parse(LLAMA_3_8B | {"num_key_value_heads": None, "rope_theta": None})
    assert (config.num_kv_heads, config.rope.theta) == (32, 10000.0)


def scaling(**changes: Any) -> dict[str, Any]:
    return {"rope_scaling": {k: v for k, v in (SCALING | changes).items() if v is not None}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of 5 KV heads"),
        ({"head_dim": 63}, "an odd number of values of a head, 63"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only silu"),
        ({"sliding_window": 4096}, "sliding_window 4096 is not supported, only none"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported, only 1"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: .*'awq'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling: rope type 'linear'"),
        (scaling(rope_type="dynamic"), "rope_scaling: rope type 'dynamic' is not supported"),
        (scaling(rope_type="yarn"), "rope type 'yarn' is not supported; .* default, llama3"),
        (scaling(factor=None), "factor is missing"),
        (scaling(high_freq_factor=1.0), "low_freq_factor 1 is not less than high_freq_factor 1"),
        (scaling(original_max_position_embeddings=None), "original_max_position_embeddings is mi"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(LLAMA_3_2_1B | change)
