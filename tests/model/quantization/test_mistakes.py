"""Quantized folders whose files and config do not agree: errors, and layers that stay plain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.loader import load_model
from support.forward_driver import ForwardDriver
from support.quantized_folders import Format, quantize_folder
from support.tiny_model import CONFIGS, edit_tensors, write_tiny_model

BLOCKS = Format("block", (16, 16))
Q_PROJ = "model.layers.0.self_attn.q_b_proj.weight"
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "plain", **CONFIGS["v3"])
    quantize_folder(tmp_path / "plain", tmp_path / "fp8", BLOCKS)
    return tmp_path / "fp8"


def answers(folder: Path) -> Tensor:
    model = load_model(folder, device="cpu", dtype=torch.float32)
    return ForwardDriver(model, page_size=16).step(chunks=[(0, list(range(7, 57)))])


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))


def test_every_mistake_is_in_one_error(folder: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors[DOWN + "_scale_inv"]
        tensors[Q_PROJ] = tensors[Q_PROJ].bfloat16()
        tensors[Q_PROJ + "_scale_inv"] = torch.ones(1, 2)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale_inv"] = torch.ones(1, 1)

    edit_tensors(folder, spoil)
    with pytest.raises(ModelError) as error:
        answers(folder)
    message, at = str(error.value), "in model.safetensors"
    assert f"1 missing: {DOWN}_scale_inv" in message
    assert f"1 unknown: lm_head.weight_scale_inv [1, 1] {at}" in message
    # 4 heads of 24 from a rank of 24
    assert f"1 misshaped: {Q_PROJ}_scale_inv [1, 2] {at}: not [6, 2]" in message
    assert "2 mistyped: " in message
    assert f"lm_head.weight [320, 64] {at}: float8_e4m3fn, not float32" in message
    assert f"{Q_PROJ} [96, 24] {at}: bfloat16, not float8_e4m3fn" in message


def test_scales_are_positive_and_finite(folder: Path) -> None:
    """A zero, negative, infinite or absent number would make every answer wrong, without an error."""
    names = [f"model.layers.1.mlp.experts.{i}.down_proj.weight_scale_inv" for i in range(4)]
    numbers = [0.0, -0.5, torch.nan, torch.inf]

    def spoil(tensors: dict[str, Tensor]) -> None:
        for name, number in zip(names, numbers, strict=True):
            tensors[name][1, 0] = number

    edit_tensors(folder, spoil)
    with pytest.raises(ModelError) as error:
        answers(folder)
    assert "4 invalid: " in str(error.value)
    for name, number in zip(names, numbers, strict=True):
        where = f"{name} [4, 2] in model.safetensors"
        assert f"{where}: a scale is {number}, not positive and finite" in str(error.value)


def test_joined_projections_have_one_format(folder: Path) -> None:
    """INT8 beside FP8, and scales a row beside scales a block."""
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))

    def mix(tensors: dict[str, Tensor]) -> None:
        tensors[gate] = tensors[gate].to(torch.int8)
        del tensors[f"{up}_scale_inv"]
        tensors[f"{up}_scale"] = torch.ones(96, 1)

    edit_tensors(folder, mix)
    with pytest.raises(ModelError) as error:
        answers(folder)
    message, at = str(error.value), "in model.safetensors"
    assert f"1 mistyped: {gate} [96, 64] {at}: int8, not float8_e4m3fn" in message
    assert f"1 missing: {up}_scale_inv" in message
    assert f"1 unknown: {up}_scale [96, 1] {at}" in message


def test_zero_points_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "plain", **CONFIGS["llama_gqa"])
    quantize_folder(tmp_path / "plain", tmp_path / "int8", Format("int8"))
    name = "model.layers.0.mlp.down_proj.weight_zero_point"
    edit_tensors(
        tmp_path / "int8", lambda tensors: tensors.update({name: torch.ones(64, 1).char()})
    )
    with pytest.raises(ModelError, match=rf"1 unknown: {name} \[64, 1\] in model\.safetensors"):
        answers(tmp_path / "int8")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_shapes_of_a_scale_for_a_tensor(tmp_path: Path, shape: tuple[int, ...]) -> None:
    write_tiny_model(tmp_path / "plain", **CONFIGS["llama_gqa"])
    quantize_folder(tmp_path / "plain", tmp_path / "fp8", Format("tensor"))
    reshape_scales(tmp_path / "fp8", shape, torch.float32)
    before = answers(tmp_path / "fp8")
    reshape_scales(tmp_path / "fp8", (1,), torch.float32)
    assert torch.equal(answers(tmp_path / "fp8"), before)


@pytest.mark.parametrize("name", ["channel", "int8"])
def test_scales_in_bfloat16_without_their_second_axis(tmp_path: Path, name: str) -> None:
    """llm-compressor writes scales in the dtype of the plain model."""
    write_tiny_model(tmp_path / "plain", **CONFIGS["llama_gqa"])
    quantize_folder(tmp_path / "plain", tmp_path / "new", Format(name))
    reshape_scales(tmp_path / "new", (-1,), torch.bfloat16)
    before = answers(tmp_path / "new")
    reshape_scales(tmp_path / "new", (-1, 1), torch.float32)
    assert torch.equal(answers(tmp_path / "new"), before)


def reshape_scales(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def reshape(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("weight_scale"):
                tensors[name] = tensor.to(dtype).reshape(shape)

    edit_tensors(folder, reshape)


def test_fp8_files_need_the_config_to_say_so(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"mistyped: .* float8_e4m3fn, not float32"):
        answers(folder)


def test_layers_that_the_config_leaves_out_are_plain(folder: Path) -> None:
    """The checkpoint's layer is plain as well, with values that are exact in both formats: the logits are the same."""
    before = answers(folder)

    def dequantize(tensors: dict[str, Tensor]) -> None:
        scale = tensors.pop(Q_PROJ + "_scale_inv")
        scale = scale.repeat_interleave(16, 0)[:96].repeat_interleave(16, 1)[:, :24]
        tensors[Q_PROJ] = tensors[Q_PROJ].float() * scale

    edit_tensors(folder, dequantize)
    with pytest.raises(ModelError, match=f"missing: {Q_PROJ}_scale_inv"):
        answers(folder)
    edit_config(folder, modules_to_not_convert=[Q_PROJ.removesuffix(".weight")])
    assert torch.equal(answers(folder), before)


def test_half_of_a_joined_projection_cannot_be_left_out(folder: Path) -> None:
    edit_config(folder, modules_to_not_convert=["model.layers.0.mlp.gate_proj"])
    with pytest.raises(
        ModelError, match=r"gate_proj is not quantized, .* joined in .*gate_up_proj"
    ):
        answers(folder)


def test_blocks_of_compressed_tensors(folder: Path) -> None:
    """The values of DeepSeek's format, under other names."""
    before = answers(folder)
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = numbers | {"strategy": "block", "block_structure": [16, 16], "dynamic": False}
    inputs = numbers | {"strategy": "group", "group_size": 128, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    file.write_text(json.dumps(config))

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name.removesuffix("_inv")] = tensors.pop(name)

    edit_tensors(folder, rename)
    assert torch.equal(answers(folder), before)


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_scales_of_activations_are_not_needed(tmp_path: Path, scheme: str) -> None:
    """AutoFP8's schemes, where the single scale of a tensor has no axis. A wrong scale of activations is an error."""
    write_tiny_model(tmp_path / "plain", **CONFIGS["v2_lite"])
    quantize_folder(tmp_path / "plain", tmp_path / "fp8", Format("tensor"))
    before = answers(tmp_path / "fp8")

    def as_auto_fp8(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[name] = tensors[name].view(())
            if scheme == "static":
                tensors[name.replace("weight_scale", "input_scale")] = torch.tensor(0.5)

    edit_tensors(tmp_path / "fp8", as_auto_fp8)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": scheme}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    assert torch.equal(answers(tmp_path / "fp8"), before)

    name = "model.layers.0.self_attn.o_proj.input_scale"
    edit_tensors(tmp_path / "fp8", lambda tensors: tensors.update({name: torch.tensor(-1.0)}))
    with pytest.raises(ModelError, match=rf"1 invalid: {name} \[\] in .*: a scale is -1\.0"):
        answers(tmp_path / "fp8")


def test_shards_with_an_index_equal_one_file(folder: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "many", shard_size="100KB", **CONFIGS["v3"])
    quantize_folder(tmp_path / "many", tmp_path / "many_fp8", BLOCKS)
    assert len(list((tmp_path / "many_fp8").glob("*.safetensors"))) > 3
    assert torch.equal(answers(tmp_path / "many_fp8"), answers(folder))
