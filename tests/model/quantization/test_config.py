"""The accepted and the refused values of a quantization_config."""

from __future__ import annotations

from typing import Any

import pytest

from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.quantization.config import parse_quantization
from mla_router.worker.model.quantization.spec import BLOCKS, FP8, INT8, Quantization

# As in the config.json of DeepSeek-V3 and V3.1, of DeepSeek-Coder-V2-Lite-Instruct-FP8 by AutoFP8, and of the
# llm-compressor's FP8-dynamic, FP8 and quantized.w8a8 models
DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
DEEPSEEK_V31 = DEEPSEEK | {"scale_fmt": "ue8m0"}
AUTO_FP8 = {
    "activation_scheme": "static",
    "ignored_layers": ["lm_head", "model.layers.1.mlp.gate"],
    "quant_method": "fp8",
}
IGNORED = ("lm_head", r"re:.*\.kv_b_proj")
WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "dynamic": False,
    "strategy": "channel",
    "observer": "minmax",
    "block_structure": None,
}
ACTIVATIONS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "dynamic": True,
    "strategy": "token",
}
INT = {"type": "int"}


def compressed(
    *,
    format: str = "float-quantized",
    activations: dict[str, Any] | None = ACTIVATIONS,
    **weights: Any,
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": WEIGHTS | weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": list(IGNORED),
        "quantization_status": "frozen",
    }


STATIC = ACTIVATIONS | {"dynamic": False, "strategy": "tensor"}
INT8_MODEL = compressed(format="int-quantized", activations=ACTIVATIONS | INT, **INT)


def of_compressed(
    dtype: str, block: tuple[int | None, int | None], *, weight_only: bool = False
) -> Quantization:
    return Quantization(
        "compressed-tensors", dtype, block, ignored=IGNORED, weight_only=weight_only
    )


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (DEEPSEEK, Quantization("fp8", FP8, (128, 128), "weight_scale_inv")),
        (DEEPSEEK_V31, Quantization("fp8", FP8, (128, 128), "weight_scale_inv")),
        (
            AUTO_FP8,
            Quantization(
                "fp8",
                FP8,
                (None, None),
                "weight_scale",
                ("lm_head", "model.layers.1.mlp.gate"),
                kv_scales="optional",
            ),
        ),
        (compressed(), of_compressed(FP8, (1, None))),
        (compressed(activations=None), of_compressed(FP8, (1, None), weight_only=True)),
        (compressed(strategy="tensor", activations=STATIC), of_compressed(FP8, (None, None))),
        (
            compressed(strategy="block", block_structure=[128, 64]),
            of_compressed(FP8, (128, 64)),
        ),
        (INT8_MODEL, of_compressed(INT8, (1, None))),
        (INT8_MODEL | {"format": "naive-quantized"}, of_compressed(INT8, (1, None))),
        (
            compressed(format="int-quantized", activations=None, **INT, strategy="tensor"),
            of_compressed(INT8, (None, None), weight_only=True),
        ),
    ],
)
def test_published_forms(raw: dict[str, Any], expected: Quantization) -> None:
    assert parse_quantization(raw) == expected


def test_ignored_layers() -> None:
    layer = "model.layers.1.self_attn.kv_b_proj"
    for entry in (layer, "model.layers.1", "model.layers.1.self_attn", r"re:.*\.1\..*kv_b_proj"):
        assert ignoring(entry).ignores(layer), entry
    for entry in ("model.layers.1.self_attn.kv_b", "kv_b_proj", "re:kv_b_proj", "model.layers.11"):
        assert not ignoring(entry).ignores(layer), entry


def ignoring(entry: str) -> Quantization:
    return Quantization("fp8", FP8, BLOCKS["tensor"], ignored=(entry,))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "quant_method None"),
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        (DEEPSEEK | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (DEEPSEEK | {"scale_fmt": "e8m0"}, "scale_fmt 'e8m0'"),
        (DEEPSEEK | {"activation_scheme": "none"}, "activation_scheme 'none'"),
        (DEEPSEEK | {"weight_block_size": [128]}, r"weight_block_size \[128\]"),
        (DEEPSEEK | {"weight_block_size": [128, 0]}, r"weight_block_size \[128, 0\]"),
        (DEEPSEEK | {"modules_to_not_convert": [1]}, "1 in modules_to_not_convert"),
        (compressed(format="pack-quantized"), "format 'pack-quantized'"),
        (compressed() | {"kv_cache_scheme": "static"}, "kv_cache_scheme"),
        (compressed() | {"config_groups": {}}, "config_groups"),
        (compressed() | {"ignore": ["re:("]}, r"'re:\(' in ignore"),
        (compressed(num_bits=4), r"group_0\.weights: num_bits 4"),
        (compressed(type="int"), r"group_0\.weights: type 'int' .* only 'float'"),
        (compressed(format="int-quantized"), r"weights: type 'float' .* only 'int'"),
        (compressed(format="naive-quantized", type="nf"), r"weights: type 'nf'"),
        (compressed(symmetric=False), r"weights: symmetric False"),
        (compressed(dynamic=True), r"weights: dynamic True"),
        (compressed(strategy="group"), "strategy 'group'"),
        (compressed(strategy="block"), "block_structure None"),
        (
            compressed(format="int-quantized", **INT, strategy="block", block_structure=[8, 8]),
            "strategy 'block'",
        ),
        (
            compressed(activations=ACTIVATIONS | {"symmetric": False}),
            r"input_activations: symmetric False",
        ),
        (compressed(activations=ACTIVATIONS | {"num_bits": 4}), "input_activations: num_bits 4"),
        (compressed(activations=ACTIVATIONS | INT), "input_activations: type 'int'"),
        (compressed(activations=ACTIVATIONS | {"dynamic": "local"}), "dynamic 'local'"),
    ],
)
def test_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_quantization(raw)
