"""The accepted and the refused values of a quantization_config."""

from __future__ import annotations

from typing import Any

import pytest

from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.quantization.config import Quantization, parse_quantization

# As in the config.json of DeepSeek-V3, of DeepSeek-Coder-V2-Lite-Instruct-FP8 by AutoFP8, and of the
# llm-compressor's FP8-dynamic models
DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
AUTO_FP8 = {
    "activation_scheme": "static",
    "ignored_layers": ["lm_head", "model.layers.1.mlp.gate"],
    "quant_method": "fp8",
}
NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": NUMBERS | {"strategy": "channel"} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*\.kv_b_proj"],
    }


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (DEEPSEEK, Quantization("weight_scale_inv", (128, 128), ())),
        (
            AUTO_FP8,
            Quantization("weight_scale", (None, None), ("lm_head", "model.layers.1.mlp.gate")),
        ),
        (compressed(), Quantization("weight_scale", (1, None), ("lm_head", r"re:.*\.kv_b_proj"))),
        (
            compressed(strategy="tensor"),
            Quantization("weight_scale", (None, None), ("lm_head", r"re:.*\.kv_b_proj")),
        ),
        (
            compressed(strategy="block", block_structure=[128, 64]),
            Quantization("weight_scale", (128, 64), ("lm_head", r"re:.*\.kv_b_proj")),
        ),
    ],
)
def test_published_forms(raw: dict[str, Any], expected: Quantization) -> None:
    assert parse_quantization(raw) == expected


def test_ignored_layers() -> None:
    layer = "model.layers.1.self_attn.kv_b_proj"
    for entry in (layer, "model.layers.1", "model.layers.1.self_attn", r"re:.*\.1\..*kv_b_proj"):
        assert Quantization("weight_scale", (None, None), (entry,)).ignores(layer), entry
    for entry in ("model.layers.1.self_attn.kv_b", "kv_b_proj", "re:kv_b_proj", "model.layers.11"):
        assert not Quantization("weight_scale", (None, None), (entry,)).ignores(layer), entry


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "quant_method None"),
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        (DEEPSEEK | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (DEEPSEEK | {"weight_block_size": [128]}, r"weight_block_size \[128\]"),
        (DEEPSEEK | {"weight_block_size": [128, 0]}, r"weight_block_size \[128, 0\]"),
        (DEEPSEEK | {"modules_to_not_convert": [1]}, "1 in modules_to_not_convert"),
        (compressed() | {"format": "int-quantized"}, "format 'int-quantized'"),
        (compressed() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (compressed() | {"config_groups": {}}, "config_groups"),
        (compressed() | {"ignore": ["re:("]}, r"'re:\(' in ignore"),
        (compressed(num_bits=4), r"group_0\.weights: num_bits 4"),
        (compressed(type="int"), "type 'int'"),
        (compressed(symmetric=False), "symmetric False"),
        (compressed(strategy="group"), "strategy 'group'"),
        (compressed(strategy="block"), "block_structure None"),
    ],
)
def test_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_quantization(raw)
