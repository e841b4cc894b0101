"""GPUs that cannot run the kernels of a model are refused before the weights are loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.engine import loader, supported
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.engine.supported import check_blocks, check_device, check_limits
from mla_router.worker.kernels.device import H200, Limits, UnsupportedDevice
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.quantization.spec import FP8, Block, Quantization
from support.architectures import LIMITS
from support.tiny_model import CONFIGS, write_tiny_model

CUDA = torch.device("cuda")
T4 = Limits(75, 40, 65_536, 65_536, 65_536)
TOO_SMALL = replace(H200, architecture=86, shared_bytes=49_152)


@pytest.fixture(params=["v2_lite", "v2_lite expanded", "llama_gqa"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    name, _, expanded = request.param.partition(" ")
    write_tiny_model(tmp_path, **CONFIGS[name])
    config = read_config(tmp_path)
    return replace(config, disable_mla=True) if expanded else config  # type: ignore[call-arg]


def test_known_gpus_serve(model: ModelConfig) -> None:
    for found in LIMITS.values():
        check_limits(found, model)


def test_a_gpu_with_too_little_shared_memory(tmp_path: Path) -> None:
    wide = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    write_tiny_model(tmp_path, **CONFIGS["v2_lite"] | wide)
    with pytest.raises(UnsupportedDevice, match=r"needs \d+ bytes of shared memory.*has 49152"):
        check_limits(TOO_SMALL, read_config(tmp_path))


@pytest.fixture
def t4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "limits", lambda _: T4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")


@pytest.mark.usefixtures("t4")
def test_an_old_gpu(model: ModelConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"--dtype bfloat16 on Tesla T4: compute capability 7\.5: .*--device cpu"
    ):
        check_device(CUDA, model, torch.bfloat16)
    check_device(CUDA, model, torch.float32)
    check_device(torch.device("cpu"), model, torch.bfloat16)


@pytest.mark.usefixtures("t4")
def test_a_start_fails_before_the_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "choose_device", lambda _: CUDA)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(loader, "prefer_shared_memory", lambda: None)
    monkeypatch.setattr(loader, "load_model", lambda *_, **__: pytest.fail("weights are loaded"))
    with pytest.raises(ConfigError, match=r"Tesla T4: compute capability 7\.5"):
        load_engine(WorkerConfig(dtype="bfloat16"))


@pytest.mark.parametrize("block", [(128, 128), (1, 128), (64, 256), (1, None), (None, None)])
def test_blocks_that_the_kernels_take(block: Block) -> None:
    check_blocks(Quantization("fp8", FP8, block))


@pytest.mark.parametrize("columns", [16, 64, 192])
def test_blocks_that_only_a_cpu_computes(tmp_path: Path, columns: int) -> None:
    write_tiny_model(tmp_path, **CONFIGS["llama_gqa"])
    quantization = Quantization("fp8", FP8, (128, columns))
    model = replace(read_config(tmp_path), quantization=quantization)
    with pytest.raises(
        ModelError, match=f"blocks of {columns} columns are not .* multiples of 128"
    ):
        check_device(CUDA, model, torch.bfloat16)
    check_device(CUDA, model, torch.float32)
    check_device(torch.device("cpu"), model, torch.bfloat16)
