"""The model has the same results on a GPU and on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mla_router.worker.config import WorkerConfig
from mla_router.worker.engine.attention.choose import choose_attention
from mla_router.worker.engine.choose import choose_config
from mla_router.worker.kernels.dequantize import dequantize_blocks
from mla_router.worker.model.loader import load_model
from support.forward_driver import ForwardDriver
from support.quantized import weight_only
from support.quantized_folders import Format, quantize_folder
from support.tiny_model import CONFIGS, raw_config, write_tiny_model

pytestmark = pytest.mark.gpu


def run(
    folder: Path,
    device: str,
    dtype: torch.dtype,
    backend: str = "torch",
    *,
    disable_mla: bool = False,
) -> Tensor:
    """Returns log-probabilities of two prefilled prompts, a mixed step and a decode step."""
    config = choose_config(WorkerConfig(model_path=str(folder), disable_mla=disable_mla))
    # Rounding of activations would turn the last bits of float32 into larger differences
    model = weight_only(load_model(folder, device=device, dtype=dtype, config=config))
    attention = choose_attention(backend, model.config, torch.device(device), dtype)
    driver = ForwardDriver(model, page_size=16, seed=1, attention=attention)
    steps = [
        driver.step(chunks=[(0, range(5, 105)), (1, range(300, 280, -1))]),
        driver.step({1: 7, 0: 250}, [(2, range(40, 77))]),
        driver.step({0: 11, 1: 12, 2: 13}),
    ]
    return torch.cat(steps).cpu()


@pytest.mark.parametrize("name", CONFIGS)
def test_float32(tmp_path: Path, name: str) -> None:
    write_tiny_model(tmp_path, **CONFIGS[name])
    got, expected = (run(tmp_path, device, torch.float32) for device in ("cuda", "cpu"))
    assert (got - expected).abs().max().item() <= 1e-4


@pytest.mark.parametrize("name", ["v3", "v2_lite", "llama_gqa"])
@pytest.mark.parametrize("kind", [Format("block", (16, 24)), Format("channel"), Format("tensor")])
def test_fp8(tmp_path: Path, name: str, kind: Format) -> None:
    write_tiny_model(tmp_path / "plain", **CONFIGS[name])
    quantize_folder(tmp_path / "plain", tmp_path / "fp8", kind)
    got, expected = (run(tmp_path / "fp8", device, torch.float32) for device in ("cuda", "cpu"))
    assert (got - expected).abs().max().item() <= 1e-4


def test_dequantizing_never_waits_for_the_device() -> None:
    weight = torch.randn(3, 40, 50, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3, 4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = dequantize_blocks(weight, scale, block=(16, 16), dtype=torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = dequantize_blocks(weight.cpu(), scale.cpu(), block=(16, 16), dtype=torch.bfloat16)
    assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16(tmp_path: Path, name: str, backend: str) -> None:
    """The median divergence from float32 is about that of bfloat16 on the CPU."""
    config = raw_config(CONFIGS[name])
    if "qk_rope_head_dim" in config:
        config["qk_rope_head_dim"] = 16  # our kernels need at least 16
    write_tiny_model(tmp_path, **config)
    exact = run(tmp_path, "cpu", torch.float32)

    def divergence(device: str, backend: str) -> float:
        short = run(tmp_path, device, torch.bfloat16, backend)
        return (exact.exp() * (exact - short)).sum(dim=-1).median().item()

    assert divergence("cuda", backend) <= 2 * divergence("cpu", "torch") + 1e-4


@pytest.mark.parametrize("name", ["v2_lite", "v3_halves"])
def test_absorption_does_not_change_results(tmp_path: Path, name: str) -> None:
    write_tiny_model(tmp_path, **CONFIGS[name] | {"qk_rope_head_dim": 16})
    exact = run(tmp_path, "cpu", torch.float32)
    torch_way = run(tmp_path, "cuda", torch.float32, disable_mla=True)
    assert (exact - torch_way).abs().max().item() <= 1e-4

    def divergence(disable_mla: bool) -> float:
        short = run(tmp_path, "cuda", torch.bfloat16, "triton", disable_mla=disable_mla)
        return (exact.exp() * (exact - short)).sum(dim=-1).median().item()

    assert divergence(True) <= 2 * divergence(False) + 1e-4
