"""Decode steps with joined kernels against transformers, in float32.

These kernels are for 16 bits on a GPU. Here `on_gpu` is patched, and they run in the interpreter.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

from mla_router.worker.kernels import norm_linear
from mla_router.worker.kernels.attention import rope_absorb
from mla_router.worker.kernels.moe import experts
from mla_router.worker.kernels.moe.shared import SharedWeights
from mla_router.worker.model.loader import load_model
from mla_router.worker.model.moe import MixtureOfExperts
from support.forward_driver import ForwardDriver
from support.tiny_model import CONFIGS, write_tiny_model
from support.triton_device import DEVICE

PROMPTS = [[3, 5, 7, 11], [2, 1, 4], [13, 17, 19, 23, 29, 31]]
NEXT = [37, 43, 53]
LAYERS = 2  # a dense one, and a mixture of experts

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu has the model in bfloat16")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Returns the number of launches of each kernel."""
    counted: Counter[str] = Counter()

    def count(module: ModuleType, name: str) -> None:
        launch = getattr(module, name)

        def counting(*args: object, **options: object) -> object:
            counted[name] += 1
            counted["shared"] += any(isinstance(given, SharedWeights) for given in args)
            return launch(*args, **options)

        monkeypatch.setattr(module, name, counting)
        monkeypatch.setattr(module, "on_gpu", lambda _: True)

    count(norm_linear, "norm_linear_triton")
    count(rope_absorb, "rope_absorb_triton")
    count(experts, "moe_experts_triton")
    return counted


@pytest.mark.parametrize(
    ("name", "slots", "normed", "absorbed"),
    [
        pytest.param("v2_lite", (1,), LAYERS, LAYERS, marks=pytest.mark.slow),
        ("v2_lite", (0, 1, 2), 0, LAYERS),
        ("v3", (2,), 2 * LAYERS, LAYERS),  # the queries' latent is normalized, too
        ("llama_gqa", (1,), LAYERS, 0),
    ],
)
@torch.no_grad()
def test_a_decode_step_as_transformers(
    tmp_path: Path,
    calls: Counter[str],
    name: str,
    slots: tuple[int, ...],
    normed: int,
    absorbed: int,
) -> None:
    config = CONFIGS[name] | {"num_hidden_layers": LAYERS}
    if config["model_type"] != "llama":
        config = config | {"qk_nope_head_dim": 64, "kv_lora_rank": 128}  # sizes of the kernel
    write_tiny_model(tmp_path, **config)
    model = load_model(tmp_path, device="cpu", dtype=torch.float32)
    driver = ForwardDriver(model, page_size=4)
    mixtures = sum(isinstance(module, MixtureOfExperts) for module in model.modules())
    driver.step(chunks=list(enumerate(PROMPTS)))
    assert not calls["rope_absorb_triton"] and not calls["shared"]
    calls.clear()
    got = driver.step({slot: NEXT[slot] for slot in slots})
    assert calls["norm_linear_triton"] == normed + mixtures
    assert calls["rope_absorb_triton"] == absorbed
    assert calls["moe_experts_triton"] == mixtures
    assert calls["shared"] == (mixtures if len(slots) == 1 else 0)

    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for slot, logprobs in zip(slots, got, strict=True):
        logits = reference(torch.tensor([[*PROMPTS[slot], NEXT[slot]]])).logits[0, -1]
        torch.testing.assert_close(logprobs, logits.log_softmax(-1), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_mixed_step_has_them_apart(tmp_path: Path, calls: Counter[str]) -> None:
    config = CONFIGS["v2_lite"] | {"qk_nope_head_dim": 64, "kv_lora_rank": 128}
    write_tiny_model(tmp_path, **config)
    driver = ForwardDriver(load_model(tmp_path, device="cpu", dtype=torch.float32), page_size=4)
    driver.step(chunks=[(0, PROMPTS[0])])
    driver.step({0: NEXT[0]}, [(1, PROMPTS[1])])
    assert not calls["rope_absorb_triton"] and not calls["shared"]
