"""Quantized checkpoints have the same logits as the plain checkpoint with the same values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mla_router.worker.kernels.weight import Weight
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.linear import Linear
from mla_router.worker.model.loader import load_model
from mla_router.worker.model.moe import Gate
from support.forward_driver import ForwardDriver
from support.quantized import weight_only
from support.quantized_folders import Format, quantize_folder, write_dequantized
from support.tiny_model import CONFIGS, write_tiny_model

PROMPT = list(range(7, 107))

# Most layers have several blocks of 128 x 128, and the last ones are cut off.
ODD: dict[str, Any] = {
    "hidden_size": 200,
    "intermediate_size": 300,
    "moe_intermediate_size": 136,
    "num_hidden_layers": 2,
    "kv_lora_rank": 144,
}
CASES: dict[str, tuple[dict[str, Any], Format]] = {
    "v3_blocks": (CONFIGS["v3"] | ODD, Format("block")),
    "v2_lite_blocks": (CONFIGS["v2_lite"] | ODD, Format("block")),
    "v3_small_blocks": (CONFIGS["v3_halves"], Format("block", (16, 24))),
    "v2_lite_channels": (CONFIGS["v2_lite"] | ODD, Format("channel")),
    "v2_lite_tensors": (CONFIGS["v2_lite"] | ODD, Format("tensor")),
    "llama_blocks": (CONFIGS["llama_gqa"], Format("block", (16, 24))),
    "v2_lite_int8": (CONFIGS["v2_lite"] | ODD, Format("int8")),
    "llama_int8": (CONFIGS["llama_gqa"], Format("int8")),
    "v3_tensors": (CONFIGS["v3_flat"], Format("tensor")),
}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(folder, device="cpu", dtype=dtype)


def answers(model: CausalLM) -> Tensor:
    """Returns log-probabilities by prefill, and by decode steps, where kv_b_proj is absorbed."""
    driver = ForwardDriver(model, page_size=16)
    prefilled = driver.step(chunks=[(0, PROMPT[:90]), (1, PROMPT[:20])])
    return torch.cat([prefilled, *(driver.step({0: token}) for token in PROMPT[90:])])


@pytest.fixture(scope="module", params=CASES)
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Format]:
    """Returns a quantized folder, and the plain folder with the same values."""
    config, kind = CASES[request.param]
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_tiny_model(folder / "source", **config)
    quantize_folder(folder / "source", folder / "quantized", kind)
    write_dequantized(folder / "quantized", folder / "plain", kind)
    return folder / "quantized", folder / "plain", kind


def test_logits_are_those_of_the_dequantized_weights(folders: tuple[Path, Path, Format]) -> None:
    quantized, plain, _ = folders
    got, expected = answers(weight_only(load(quantized))), answers(load(plain))
    difference = (got - expected).abs().max().item()
    assert difference <= 1e-5, difference


def test_a_checkpoint_without_a_scheme_of_activations_keeps_them_as_they_are(
    tmp_path: Path,
) -> None:
    kind = Format("channel")
    write_tiny_model(tmp_path / "source", **CONFIGS["llama_gqa"])
    quantize_folder(tmp_path / "source", tmp_path / "quantized", kind)
    write_dequantized(tmp_path / "quantized", tmp_path / "plain", kind)
    expected = answers(load(tmp_path / "plain"))
    quantized = answers(load(tmp_path / "quantized"))
    assert (quantized - expected).abs().max().item() > 1e-3
    file = tmp_path / "quantized" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    file.write_text(json.dumps(config))
    kept = answers(load(tmp_path / "quantized"))
    assert (kept - expected).abs().max().item() <= 1e-5


def test_logits_are_those_of_transformers(folders: tuple[Path, Path, Format]) -> None:
    quantized, plain, _ = folders
    reference: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0].log_softmax(dim=-1)
    got = answers(weight_only(load(quantized)))
    expected = torch.cat([expected[:90], expected[:20], expected[90:]])
    difference = (got - expected).abs().max().item()
    assert difference <= 1e-4, difference


def test_bfloat16_rounds_the_products_of_float32(folders: tuple[Path, Path, Format]) -> None:
    quantized, plain, _ = folders
    ours, expected = (
        {
            name: layer.operand.dense(torch.bfloat16).values
            for name, layer in load(folder, torch.bfloat16).named_modules()
            if isinstance(layer, Linear)
        }
        for folder in (quantized, plain)
    )
    assert ours.keys() == expected.keys()
    for name, values in ours.items():
        assert torch.equal(values, expected[name]), name


def test_only_experts_that_a_token_was_routed_to_are_dequantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path / "source", **CONFIGS["v3"])
    quantize_folder(tmp_path / "source", tmp_path / "quantized", Format("block", (16, 24)))
    model = load(tmp_path / "quantized")
    driver = ForwardDriver(model, page_size=16)
    driver.step(chunks=[(0, PROMPT)])
    routed: list[list[int]] = []
    for module in model.modules():
        if isinstance(module, Gate):
            module.register_forward_hook(
                lambda *call: routed.append(sorted(call[2][1][0].tolist()))
            )
    dequantized: dict[int, list[int]] = {}
    expert = Weight.expert

    def counted(self: Weight, index: int) -> Weight:
        dequantized.setdefault(self.values.data_ptr(), []).append(index)
        return expert(self, index)

    monkeypatch.setattr(Weight, "expert", counted)
    driver.step({0: 5})
    assert [len(experts) for experts in routed] == [3, 3]
    # Both projections of each layer
    assert list(dequantized.values()) == [routed[0], routed[0], routed[1], routed[1]]


def test_linear_layers_stay_quantized_and_nothing_else_is(
    folders: tuple[Path, Path, Format],
) -> None:
    model = load(folders[0])
    kept = {n for n, p in model.named_parameters() if p.dtype == folders[2].dtype}
    linear = {n for n, _ in model.named_parameters() if n.endswith("_proj.weight")}
    assert kept == {n for n in linear if not n.endswith("kv_b_proj.weight")}
    assert len(kept) > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_absorbed_projections_are_plain_after_loading(
    folders: tuple[Path, Path, Format], dtype: torch.dtype
) -> None:
    """They are the checkpoint's numbers, rounded once, without a scale beside them."""
    quantized, plain = (dict(load(folder, dtype).named_parameters()) for folder in folders[:2])
    absorbed = [name for name in quantized if "kv_b_proj" in name]
    assert absorbed == [name for name in plain if "kv_b_proj" in name]
    for name in absorbed:
        assert quantized[name].dtype == dtype and torch.equal(quantized[name], plain[name])
