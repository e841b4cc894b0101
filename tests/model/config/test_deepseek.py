"""DeepSeek's config.json: the values of published checkpoints, and refused values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_router.worker.kv_cache.spec import LatentSpec, bytes_per_token
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.read import parse_config
from mla_router.worker.model.config.rope import YarnConfig

# As on the hub, without fields that do not change the arithmetic.
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "torch_dtype": "bfloat16",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
V3: dict[str, Any] = V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
}


def parse(raw: dict[str, Any]) -> DeepseekConfig:
    config = parse_config(raw)
    assert isinstance(config, DeepseekConfig)
    return config


def test_v2_lite() -> None:
    config = parse(V2_LITE)
    assert (config.num_layers, config.vocab_size, config.dtype) == (27, 102400, "bfloat16")
    specs = config.kv_cache_specs(torch.bfloat16)
    latent = LatentSpec(dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64)
    assert specs == (latent,) * 27
    assert bytes_per_token(specs) == 27 * 576 * 2
    assert config.qk_head_dim == 192
    assert config.max_position_embeddings == 163840
    assert config.q_lora_rank is None
    assert (config.scoring, config.selection_bias) == ("softmax", False)
    assert config.rope.interleaved
    assert config.rope.scaling == YarnConfig(40.0, 4096, 32.0, 1.0, None, 0.707, 0.707, True)


def test_v3() -> None:
    config = parse(V3)
    assert (config.scoring, config.selection_bias) == ("sigmoid", True)
    assert (config.num_expert_groups, config.top_expert_groups) == (8, 4)
    assert (config.normalize_expert_weights, config.routed_scaling_factor) == (True, 2.5)
    assert (config.num_dense_layers, config.num_mtp_layers) == (3, 1)


def test_without_topk_group_all_groups_are_open() -> None:
    config = parse({name: value for name, value in V3.items() if name != "topk_group"})
    assert (config.num_expert_groups, config.top_expert_groups) == (8, 8)


def test_v2_groups_count_only_if_the_method_uses_them() -> None:
    grouped = V2_LITE | {"n_group": 8, "topk_group": 3}
    assert parse(grouped).num_expert_groups == 1
    config = parse(grouped | {"topk_method": "group_limited_greedy"})
    assert (config.num_expert_groups, config.top_expert_groups) == (8, 3)


def test_rope_parameters_of_transformers_5_mean_the_same_as_rope_scaling() -> None:
    old = V2_LITE | {"rope_theta": 50000}
    new = {name: value for name, value in old.items() if not name.startswith("rope_")}
    scaling = {name: value for name, value in old["rope_scaling"].items() if name != "type"}
    new["rope_parameters"] = scaling | {"rope_type": "yarn", "rope_theta": 50000}
    assert parse_config(new) == parse_config(old)
    assert parse_config(new).rope.theta == 50000


def test_context_includes_the_stretch_of_yarn() -> None:
    assert parse_config(V2_LITE | {"max_position_embeddings": 4096}).max_position_embeddings == (
        40 * 4096
    )
    plain = V2_LITE | {"max_position_embeddings": 4096, "rope_scaling": None}
    assert parse_config(plain).max_position_embeddings == 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only silu"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, only sigmoid"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported, only noaux_tc"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
        ({"qk_rope_head_dim": 63}, "an odd number of values of a head, 63"),
        ({"n_group": 7}, "cannot route"),
        ({"topk_group": 9}, "topk_group 9 is more than n_group 8"),
        ({"topk_group": 1, "num_experts_per_tok": 33}, "cannot route"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers 'many' is not a positive integer"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message.replace("(", r"\(")):
        parse_config(V3 | change)
