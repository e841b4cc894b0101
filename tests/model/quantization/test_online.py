"""Plain checkpoints that are quantized while they load."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.weight import Weight
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.linear import Linear
from mla_router.worker.model.loader import load_model
from mla_router.worker.model.quantization.choose import ONLINE
from mla_router.worker.model.quantization.online import quantize_blocks
from support.tiny_model import CONFIGS, edit_tensors, write_tiny_model

FP8, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {FP8: 448.0, INT8: 127.0}
# Several blocks of 128, the last ones cut off, and parts that begin within a block
ODD: dict[str, Any] = {
    "hidden_size": 200,
    "intermediate_size": 300,
    "moe_intermediate_size": 136,
    "num_hidden_layers": 2,
}
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


def config_of(folder: Path, method: str) -> ModelConfig:
    return replace(read_config(folder), quantization=ONLINE[method])


def load(folder: Path, method: str | None = None, **how: Any) -> CausalLM:
    config = config_of(folder, method) if method else None
    return load_model(folder, device="cpu", dtype=torch.float32, config=config, **how)


def linears(model: torch.nn.Module) -> dict[str, Weight]:
    return {n: m.operand for n, m in model.named_modules() if isinstance(m, Linear)}


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((16, 24), (8, 8)),
        ((21, 30), (8, 8)),
        ((5, 7), (8, 8)),
        ((9, 20), (1, 20)),
        ((9, 20), (9, 20)),
    ],
)
@pytest.mark.parametrize("plain", [torch.float32, torch.bfloat16])
def test_values_are_the_nearest_of_the_type(
    dtype: torch.dtype, shape: tuple[int, int], block: tuple[int, int], plain: torch.dtype
) -> None:
    """Against all finite values of the type, in float64."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).exp().mul(0.02).to(plain)
    weight *= torch.randn(shape, generator=generator).sign()
    weight[:2, :2] = 0
    values, scales = quantize_blocks(weight, block, dtype)
    assert values.dtype == dtype and values.shape == shape and values.is_contiguous()
    assert scales.dtype == torch.float32
    assert scales.shape == tuple(math.ceil(a / b) for a, b in zip(shape, block, strict=True))

    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    every = every[every.abs() <= LARGEST[dtype]]
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            numbers, scale = weight[at].double(), scales[i, j].double()
            expected = numbers.abs().amax() / LARGEST[dtype]
            assert (scale - expected).abs() <= 1e-6 * expected
            nearest = (numbers[..., None] - every * scale).abs().amin(-1)
            error = (numbers - values[at].double() * scale).abs()
            # Near the middle between two values float32 may choose either
            assert (error <= nearest + 1e-4 * expected).all()


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 3e38])
def test_blocks_of_extreme_sizes(dtype: torch.dtype, size: float) -> None:
    """Zeros stay zeros. The smallest float32 numbers become zeros, and the largest ones do not overflow."""
    values, scales = quantize_blocks(torch.full((4, 4), size), (4, 4), dtype)
    assert (scales > 0).all() and scales.isfinite().all()
    numbers = values.double() * scales.double()
    assert (numbers - size).abs().max() <= max(1e-6 * size, 1e-38)


@pytest.mark.parametrize("method", ONLINE)
@pytest.mark.parametrize("name", ["v3", "v2_lite", "llama_gqa", "qwen2", "gemma2"])
def test_each_linear_layer_is_close_to_the_checkpoint(
    tmp_path: Path, name: str, method: str
) -> None:
    config = CONFIGS[name] if name in ("llama_gqa", "qwen2", "gemma2") else CONFIGS[name] | ODD
    write_tiny_model(tmp_path, **config)
    plain, quantized = load(tmp_path), load(tmp_path, method)
    expected = linears(plain)
    kept_plain = {"kv_b_proj", "lm_head"}
    for path, weight in linears(quantized).items():
        if path.rpartition(".")[2] in kept_plain:
            assert weight.is_plain and torch.equal(weight.values, expected[path].values)
            continue
        assert weight.values.dtype == (INT8 if method == "w8a8_int8" else FP8), path
        assert weight.block[1] == (128 if method == "fp8" else weight.values.shape[-1]), path
        numbers = expected[path].values
        # Half a step of FP8's 3 bits, or of 127 steps up to the largest number of a row or block
        step = numbers.abs() / 16 if weight.values.dtype == FP8 else torch.zeros(())
        largest = numbers.abs().amax() / (448 * 2**10 if weight.values.dtype == FP8 else 254)
        error = (weight.dense(torch.float32).values - numbers).abs()
        assert (error <= 1.001 * (step + largest)).all(), path
        assert error.max() > 0, path
    others = {n: p for n, p in plain.named_parameters() if not n.endswith("_proj.weight")}
    mine = dict(quantized.named_parameters())
    assert all(torch.equal(mine[name], parameter) for name, parameter in others.items())


def test_joined_parts_and_experts_have_scales_of_their_own(tmp_path: Path) -> None:
    """A part 100 times as large as its neighbour does not take the neighbour's precision."""
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    names = [
        "model.layers.1.mlp.experts.3.up_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        DOWN,
    ]

    def enlarge(tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors[name] *= 100

    before = linears(load(tmp_path, "fp8"))
    edit_tensors(tmp_path, enlarge)
    after = linears(load(tmp_path, "fp8"))
    for path, weight in before.items():
        a, b = weight.dense(torch.float32).values, after[path].dense(torch.float32).values
        factor = torch.ones_like(a)
        if path == "model.layers.0.mlp.gate_up_proj":
            factor[:96] = 100
        elif path == "model.layers.1.mlp.experts.gate_up_proj":
            factor[3, 32:] = 100
        elif path == "model.layers.1.mlp.experts.down_proj":
            factor[3] = 100
        # 100 is no power of two: products are rounded anew, and some values move to a neighbour
        torch.testing.assert_close(b, a * factor, rtol=0.13, atol=1e-5)


@pytest.mark.parametrize("method", ONLINE)
def test_random_weights(tmp_path: Path, method: str) -> None:
    """--load-format dummy has the same formats, without a file."""
    write_tiny_model(tmp_path, **CONFIGS["v2_lite"])
    loaded = load(tmp_path, method)
    (tmp_path / "model.safetensors").unlink()
    drawn = load(tmp_path, method, dummy=True)
    shapes = [
        {n: (p.shape, p.dtype) for n, p in model.named_parameters()} for model in (loaded, drawn)
    ]
    assert shapes[0] == shapes[1]
    for path, weight in linears(drawn).items():
        numbers = weight.dense(torch.float32).values
        deviation = numbers.shape[-1] ** -0.5
        assert numbers.std() == pytest.approx(deviation, rel=0.1), path


def test_every_mistake_is_in_one_error(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[DOWN][2, 5] = torch.nan
        o_proj, gate = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.gate_proj"
        tensors[o_proj][7, 3] = -torch.inf
        tensors[f"{gate}.weight"] = tensors[f"{gate}.weight"].to(FP8)
        tensors[f"{gate}.weight_scale"] = torch.ones(1)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(5, 6)
        del tensors["model.layers.0.mlp.down_proj.weight"]

    edit_tensors(tmp_path, spoil)
    with pytest.raises(ModelError) as error:
        load(tmp_path, "fp8")
    message, at = str(error.value), "in model.safetensors"
    assert "2 invalid: " in message
    for name in (f"{DOWN} [64, 32]", "model.layers.0.self_attn.o_proj.weight [64, 96]"):
        assert f"{name} {at}: a weight is NaN or infinite" in message
    assert f"1 mistyped: model.layers.0.mlp.gate_proj.weight [96, 64] {at}: float8" in message
    assert f"1 unknown: model.layers.0.mlp.gate_proj.weight_scale [1] {at}" in message
    assert f"1 misshaped: model.layers.0.mlp.up_proj.weight [5, 6] {at}: not [96, 64]" in message
    assert "1 missing: model.layers.0.mlp.down_proj.weight" in message
