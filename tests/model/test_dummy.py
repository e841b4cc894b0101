"""Random weights: a folder runs without its weight files, and behaves like a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mla_router.worker.model.loader import load_model
from support.corners import corners
from support.forward_driver import ForwardDriver
from support.tiny_model import CONFIGS, write_tiny_model

PROMPT = list(range(7, 257))
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}


@pytest.mark.parametrize(
    ("name", "quantized", "dtype"),
    corners(list(CONFIGS), [False, True], [torch.float32, torch.float16]),
)
def test_logits_are_finite_and_tokens_spread_over_experts(
    tmp_path: Path, name: str, quantized: bool, dtype: torch.dtype
) -> None:
    write_tiny_model(tmp_path, **CONFIGS[name])
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    if quantized:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))

    model = load_model(tmp_path, device="cpu", dtype=dtype, dummy=True)
    is_fp8 = {parameter.dtype == torch.float8_e4m3fn for parameter in model.parameters()}
    assert (True in is_fp8) == quantized
    chosen: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        del module, inputs
        chosen.append(output[1])

    gates = [m for n, m in model.named_modules() if n.endswith(".mlp.gate")]
    for gate in gates:
        gate.register_forward_hook(note)
    logprobs = ForwardDriver(model, page_size=16).step(chunks=[(0, PROMPT)])

    assert logprobs.isfinite().all()
    assert len(logprobs.argmax(dim=-1).unique()) > 20
    if model.lm_head is not None:
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        assert (entropy > 3).all(), entropy.min()  # of ln 320 = 5.8
    for ids in chosen:
        # Every expert has tokens, and none has three times its share.
        counts = torch.bincount(ids.flatten(), minlength=8)
        assert counts.min() > 0 and counts.max() < 3 * counts.float().mean(), counts
    assert len(chosen) == len(gates)


def test_the_same_each_time(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    first, second = (
        load_model(tmp_path, device="cpu", dtype=torch.float32, dummy=True) for _ in range(2)
    )
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
