"""A weight format is one class: two formats of the test, in a whole model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mla_router.worker.kernels.weight import Weight
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.linear import (
    Linear,
    LinearShape,
    Place,
    WeightFormat,
    empty_parameter,
)
from mla_router.worker.model.loader import after_load, allocate, load_model
from mla_router.worker.model.registry import build_model
from mla_router.worker.model.weights import load_weights
from support.forward_driver import ForwardDriver
from support.tiny_model import CONFIGS, write_tiny_model


class Int8(WeightFormat):
    """One scale for each output."""

    def create(self, shape: LinearShape) -> dict[str, nn.Parameter]:
        values = shape.stacked(shape.outputs, shape.inputs)
        return {
            "weight": empty_parameter(*values, dtype=torch.int8),
            "weight_scale": empty_parameter(*shape.stacked(shape.outputs, 1), dtype=torch.float32),
        }

    def weight(self, layer: Linear) -> Weight:
        scales = layer.get_parameter("weight_scale")
        block = 1, layer.shape.inputs
        return Weight(layer.weight, scales, block, constant=True, weight_only=True)

    def fill_random(self, places: Mapping[str, Place], generator: torch.Generator) -> None:
        del places, generator
        raise AssertionError("not of this test")

    def quantize(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the tensors of a checkpoint, and the numbers that they stand for."""
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        values = (weight / scale).round().to(torch.int8)
        return {"weight": values, "weight_scale": scale}, values.float() * scale


class Packed4(Int8):
    """Two numbers from -8 to 7 in a byte, under another name, with one scale for each output."""

    def create(self, shape: LinearShape) -> dict[str, nn.Parameter]:
        values = shape.stacked(shape.outputs, shape.inputs // 2)
        return {
            "weight_packed": empty_parameter(*values, dtype=torch.uint8),
            "weight_scale": empty_parameter(*shape.stacked(shape.outputs, 1), dtype=torch.float32),
        }

    def weight(self, layer: Linear) -> Weight:
        scales = layer.get_parameter("weight_scale")
        packed = layer.get_parameter("weight_packed")
        return Weight(packed, scales, constant=True, dequantize=unpacked)

    def quantize(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = weight.abs().amax(dim=1, keepdim=True) / 7
        values = (weight / scale).round()
        low, high = (values + 8).to(torch.uint8).view(len(weight), -1, 2).unbind(-1)
        return {"weight_packed": low + 16 * high, "weight_scale": scale}, values * scale


def unpacked(
    packed: Tensor, scales: Tensor, *, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    del block
    both = torch.stack((packed % 16, packed // 16), dim=-1).flatten(-2)
    return ((both.float() - 8) * scales).to(dtype)


def answers(model: CausalLM) -> Tensor:
    driver = ForwardDriver(model, page_size=16)
    prefilled = driver.step(chunks=[(0, list(range(7, 47))), (1, list(range(9, 20)))])
    return torch.cat([prefilled, driver.step({0: 5, 1: 6})])


@pytest.mark.parametrize("name", ["v3", "v2_lite", "llama_gqa"])
@pytest.mark.parametrize("weight_format", [Int8(), Packed4()])
def test_logits_are_those_of_the_dequantized_weights(
    tmp_path: Path, name: str, weight_format: Int8
) -> None:
    write_tiny_model(tmp_path / "plain", **CONFIGS[name])
    config = read_config(tmp_path / "plain")
    model = build_model(config)
    for path, module in model.named_modules():
        if isinstance(module, Linear) and not path.endswith("lm_head"):
            module.set_format(weight_format)
    allocate(model)

    plain = load_file(tmp_path / "plain" / "model.safetensors")
    stored = dict[str, Tensor]()
    for key, tensor in plain.items():
        if key.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            new, plain[key] = weight_format.quantize(tensor)
            layer = key.removesuffix("weight")
            stored |= {layer + kind: value.contiguous() for kind, value in new.items()}
        else:
            stored[key] = tensor
    save_file(plain, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "new").mkdir()
    save_file(stored, tmp_path / "new" / "model.safetensors", metadata={"format": "pt"})

    load_weights(model, tmp_path / "new", lambda _: False)
    after_load(model, torch.float32)
    expected = answers(load_model(tmp_path / "plain", device="cpu", dtype=torch.float32))
    assert (answers(model.eval()) - expected).abs().max().item() <= 1e-4


def test_a_format_takes_the_place_of_the_one_before() -> None:
    layer = Linear(8, {"q_proj": 4, "k_proj": 2}, bias=True)
    assert {name for name, _ in layer.named_parameters()} == {"weight", "bias"}
    layer.set_format(Packed4())
    assert {name for name, _ in layer.named_parameters()} == {
        "weight_packed",
        "weight_scale",
        "bias",
    }
    assert layer.get_parameter("weight_packed").shape == (6, 4)
