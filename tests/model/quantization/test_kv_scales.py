"""Scales of FP8 KV caches in the checkpoints of compressed-tensors and AutoFP8."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_router.worker.kernels.kv_cache.fp8 import UNSCALED, KVScales
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.decoder import AttentionLayer
from mla_router.worker.model.loader import load_model
from support.quantized_folders import Format, quantize_folder
from support.tiny_model import CONFIGS, write_tiny_model

# As llm-compressor writes it
SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
    "observer": "minmax",
    "block_structure": None,
}


def folder_with(
    tmp_path: Path,
    scheme: object,
    scales: Callable[[int], dict[str, Tensor]],
    name: str = "v3",
    *,
    auto_fp8: bool = False,
) -> Path:
    """Returns an FP8 folder in which layer i has the tensors `scales(i)`."""
    write_tiny_model(tmp_path / "plain", **CONFIGS[name])
    folder = tmp_path / "quantized"
    quantize_folder(tmp_path / "plain", folder, Format("tensor" if auto_fp8 else "channel"))
    config = json.loads((folder / "config.json").read_text())
    if auto_fp8:
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for own, tensor in scales(layer).items():
            tensors[f"model.layers.{layer}.self_attn.{own}"] = tensor.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def both(keys: float, values: float) -> Callable[[int], dict[str, Tensor]]:
    return lambda layer: {
        "k_scale": torch.tensor([keys + layer]),
        "v_scale": torch.tensor(values, dtype=torch.bfloat16),  # without an axis
    }


def layers(model: CausalLM) -> list[AttentionLayer]:
    return [module for module in model.modules() if isinstance(module, AttentionLayer)]


@pytest.mark.parametrize("name", ["v3", "llama_gqa"])
def test_each_layer_has_its_scales(tmp_path: Path, name: str) -> None:
    folder = folder_with(tmp_path, SCHEME, both(0.5, 0.25), name)
    found = layers(load_model(folder, device="cpu", dtype=torch.float32))
    assert [layer.kv_scales for layer in found] == [KVScales(0.5 + i, 0.25) for i in range(3)]
    cache = torch.empty(1, 1, 1)
    assert found[1].scales_of(cache) == UNSCALED
    assert found[1].scales_of(cache.to(torch.float8_e5m2)) == KVScales(1.5, 0.25)


def test_without_a_scheme_or_files_scales_are_1(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, None, lambda _: {})
    plain = load_model(folder, device="cpu", dtype=torch.float32)
    dummy = folder_with(tmp_path / "dummy", SCHEME, lambda _: {})
    random = load_model(dummy, device="cpu", dtype=torch.float32, dummy=True)
    assert {layer.kv_scales for layer in layers(plain) + layers(random)} == {UNSCALED}


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_named(tmp_path: Path, scale: float) -> None:
    folder = folder_with(tmp_path, SCHEME, both(1.0, scale))
    with pytest.raises(
        ModelError, match=r"invalid: model\.layers\.0\.self_attn\.v_scale \[\] .*: a sc"
    ):
        load_model(folder, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("name", ["v3", "llama_gqa"])
@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({"kv_scale": 0.5}, KVScales(0.5, 0.5)),
        ({"k_scale": 0.5, "v_scale": 0.25}, KVScales(0.5, 0.25)),
        ({"k_scale": 0.5}, KVScales(0.5, 0.5)),
        ({"v_scale": 0.25}, KVScales(0.25, 0.25)),
        ({"kv_scale": 2.0, "k_scale": 0.5, "v_scale": 0.25}, KVScales(0.5, 0.25)),
        ({}, UNSCALED),
    ],
)
def test_auto_fp8_may_have_scales(
    tmp_path: Path, name: str, scales: dict[str, float], expected: KVScales
) -> None:
    tensors = {kind: torch.tensor(scale) for kind, scale in scales.items()}
    folder = folder_with(tmp_path, "static", lambda _: tensors, name, auto_fp8=True)
    found = layers(load_model(folder, device="cpu", dtype=torch.float32))
    assert [layer.kv_scales for layer in found] == [expected] * 3


@pytest.mark.parametrize("scale", [[0.0], [-1.0], [float("nan")], [1.0, 1.0]])
def test_a_wrong_scale_of_auto_fp8_is_named(tmp_path: Path, scale: list[float]) -> None:
    tensors = {"kv_scale": torch.tensor(scale)}
    folder = folder_with(tmp_path, None, lambda _: tensors, auto_fp8=True)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.kv_scale \[\d\] in"):
        load_model(folder, device="cpu", dtype=torch.float32)


def test_absent_and_misshaped_scales_are_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, SCHEME, lambda _: {"k_scale": torch.ones(2)})
    with pytest.raises(ModelError) as error:
        load_model(folder, device="cpu", dtype=torch.float32)
    assert "missing: model.layers.0.self_attn.v_scale, model.layers.1.self_attn.v_s" in str(
        error.value
    )
    assert "misshaped: model.layers.0.self_attn.k_scale [2]" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 4}, "kv_cache_scheme: num_bits 4"),
        ({"type": "int"}, "kv_cache_scheme: type 'int'"),
        ({"strategy": "attn_head"}, "kv_cache_scheme: strategy 'attn_head'"),
        ({"dynamic": True}, "kv_cache_scheme: dynamic True"),
        ({"symmetric": False}, "kv_cache_scheme: symmetric False"),
    ],
)
def test_other_schemes_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = folder_with(tmp_path, SCHEME | change, both(1.0, 1.0))
    with pytest.raises(ModelError, match=message):
        load_model(folder, device="cpu", dtype=torch.float32)
