"""The selection of attention backends, and the reasons against the others."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.engine.attention import choose, triton
from mla_router.worker.engine.attention.choose import choose_attention
from mla_router.worker.engine.attention.layout import AttentionBackend
from mla_router.worker.engine.attention.torch import TorchBackend
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.config.llama import LlamaConfig
from mla_router.worker.model.config.read import read_config
from support.tiny_model import CONFIGS, write_tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def latent() -> DeepseekConfig:
    config = read_config(WorkerConfig().folder)
    assert isinstance(config, DeepseekConfig)
    return config


@pytest.fixture
def grouped(tmp_path: Path) -> LlamaConfig:
    write_tiny_model(tmp_path, **CONFIGS["llama_gqa"])
    config = read_config(tmp_path)
    assert isinstance(config, LlamaConfig)
    return config


@pytest.mark.parametrize("wanted", ["triton", "flashinfer"])
def test_reasons_of_our_kernels(wanted: str, latent: DeepseekConfig, grouped: LlamaConfig) -> None:
    narrow = replace(latent, qk_rope_head_dim=8)
    for model, device, dtype, obstacle in (
        (latent, CPU, torch.bfloat16, "device cpu"),
        (latent, CUDA, torch.float32, "torch.float32"),
        (grouped, CPU, torch.bfloat16, "device cpu"),
        (replace(grouped, head_dim=320), CUDA, torch.bfloat16, "not 320"),
        (replace(latent, disable_mla=True), CPU, torch.bfloat16, "device cpu"),
        (narrow, CUDA, torch.bfloat16, "qk_rope_head_dim, not 8"),
        (replace(latent, kv_lora_rank=96), CUDA, torch.bfloat16, "kv_lora_rank, not 96"),
    ):
        with pytest.raises(ConfigError, match=f"--attention-backend {wanted}: .*{obstacle}"):
            choose_attention(wanted, model, device, dtype)
        with pytest.raises(ConfigError, match=r"--enable-flashinfer-mla: (needs|has) "):
            choose_attention("auto", model, device, dtype, flashinfer_mla=True)
        assert choose_attention("auto", model, device, dtype).name == "torch"


def test_flashinfer_decodes_latents_of_its_width(
    latent: DeepseekConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so beside any prefill backend. The package is imported only if it could serve the model."""
    monkeypatch.setitem(sys.modules, "flashinfer.mla", None)
    model = replace(latent, kv_lora_rank=512, qk_rope_head_dim=64)
    for config, obstacle in ((model, "pip install"), (replace(model, kv_lora_rank=256), "256, 64")):
        with pytest.raises(ConfigError, match=f"--enable-flashinfer-mla: .*{obstacle}"):
            choose_attention("torch", config, CUDA, torch.bfloat16, flashinfer_mla=True)


def test_prompts_of_many_heads_go_to_flashinfer_where_it_is_installed(
    latent: DeepseekConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Prefill(TorchBackend):
        name = "flashinfer"

    class Decode(TorchBackend):
        def __init__(self, prefill: AttentionBackend, *_: Any) -> None:
            self.name = f"{prefill.name}+flashinfer_mla"

    class NotInstalled(Decode):
        @classmethod
        def supports(cls, *_: Any) -> str:
            return "needs FlashInfer: pip install"

    def chosen(heads: int, wanted: str = "auto", **flags: bool) -> str:
        model = replace(latent, num_heads=heads)
        return choose_attention(wanted, model, CUDA, torch.bfloat16, **flags).name

    monkeypatch.setattr(triton, "Upload", lambda _: None)  # pins memory, which needs a GPU
    monkeypatch.setattr(choose, "FlashInferBackend", Prefill)
    monkeypatch.setattr(choose, "FlashInferMlaBackend", Decode)
    assert chosen(128) == chosen(128, "flashinfer") == chosen(16, "flashinfer") == "flashinfer"
    assert chosen(16) == chosen(128, "triton") == "triton"
    assert chosen(16, flashinfer_mla=True) == "triton+flashinfer_mla"
    assert chosen(128, flashinfer_mla=True) == "flashinfer+flashinfer_mla"
    monkeypatch.setattr(choose, "FlashInferBackend", NotInstalled)
    monkeypatch.setattr(choose, "FlashInferMlaBackend", NotInstalled)
    assert chosen(128) == "triton"
    with pytest.raises(ConfigError, match="pip install"):
        chosen(128, flashinfer_mla=True)


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [({"window": 128}, "sliding windows, .* 128 tokens"), ({"softcap": 50.0}, "capped .* 50.0")],
)
def test_attention_without_a_kernel_is_refused(
    latent: DeepseekConfig, change: dict[str, Any], obstacle: str
) -> None:
    spec = replace(latent.attention_spec(0), **change)
    model: Any = SimpleNamespace(attention_specs=(latent.attention_spec(0), spec))
    for device in (CPU, CUDA):
        with pytest.raises(ConfigError, match=f"--attention-backend torch: .*{obstacle}"):
            choose_attention("torch", model, device, torch.bfloat16)
        with pytest.raises(ConfigError, match=f"--attention-backend torch: .*{obstacle}"):
            choose_attention("auto", model, CPU, torch.bfloat16)


def test_windows_and_soft_caps_of_grouped_query_attention(grouped: LlamaConfig) -> None:
    spec = replace(grouped.attention_spec(0), window=128, softcap=50.0)
    model: Any = SimpleNamespace(attention_specs=(grouped.attention_spec(0), spec))
    assert choose_attention("auto", model, CPU, torch.bfloat16).name == "torch"
    dtypes = torch.bfloat16, torch.bfloat16
    assert triton.TritonBackend.supports(spec, CUDA, *dtypes) is None


def test_flashinfer_is_for_latents(grouped: LlamaConfig) -> None:
    with pytest.raises(
        ConfigError, match="--attention-backend flashinfer: needs a KV cache of latents"
    ):
        choose_attention("flashinfer", grouped, CUDA, torch.bfloat16)
    with pytest.raises(ConfigError, match="--enable-flashinfer-mla: needs a KV cache of latents"):
        choose_attention("auto", grouped, CUDA, torch.bfloat16, flashinfer_mla=True)


def test_torch_on_request(latent: DeepseekConfig) -> None:
    assert choose_attention("torch", latent, CUDA, torch.bfloat16).name == "torch"
