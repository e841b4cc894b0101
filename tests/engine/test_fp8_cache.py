"""An engine with an FP8 KV cache: the same tokens however a prompt is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.engine import supported
from mla_router.worker.engine.capacity import capacity_without_pages, plan_capacity
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.engine.supported import check_device
from mla_router.worker.kernels.kv_cache.fp8 import FORMATS, KVScales
from mla_router.worker.messages import ToScheduler
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.decoder import AttentionLayer
from mla_router.worker.model.loader import load_model
from mla_router.worker.step.engine import Capacity
from support.architectures import A100, H200, L40S
from support.attention import torch_attention
from support.cached_rows import cached_rows
from support.random_requests import random_script
from support.scripted_scheduler import generate, run
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

CPU = torch.device("cpu")
CAPACITY = Capacity(120, 4, 12, 160)


@pytest.fixture(scope="module", params=["v3", "llama_gqa"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """A model whose layers have scales other than 1."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, **CONFIGS[request.param])
    model = load_model(folder, device=CPU, dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            module.kv_scales = KVScales(0.3, 0.2)
    return model


def engine_of(model: CausalLM, dtype: torch.dtype, capacity: Capacity = CAPACITY) -> Engine:
    return Engine(
        model,
        capacity,
        device=CPU,
        dtype=torch.float32,
        attention=torch_attention(model.config),
        kv_cache_dtype=dtype,
    )


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, pytest.param(torch.float8_e5m2, marks=pytest.mark.slow)]
)
def test_neither_cache_nor_chunks_nor_retraction_change_the_tokens(
    model: CausalLM, dtype: torch.dtype
) -> None:
    script = random_script(7, 16, aborts=False)

    def tokens(capacity: Capacity = CAPACITY, **how: Any) -> list[list[int]]:
        engine = engine_of(model, dtype, capacity)
        done = run(script, engine=engine, capacity=capacity, vocab_size=VOCAB_SIZE, **how)
        return [done.channel.tokens(f"r{n}") for n in range(16)]

    expected = tokens(chunk_size=4096, use_prefix_cache=False)
    assert tokens(chunk_size=7) == expected
    assert tokens(chunk_size=64, overlap=False) == expected
    retracting = Capacity(34, 4, 12, 120)
    assert tokens(retracting, schedule_conservativeness=0.01) == expected


@pytest.mark.parametrize("dtype", FORMATS.values())
def test_rows_are_stored_in_one_byte_a_number(model: CausalLM, dtype: torch.dtype) -> None:
    script: dict[int, list[ToScheduler]] = {0: [generate("a", list(range(3, 50)), max_tokens=1)]}
    engines = [engine_of(model, kind) for kind in (dtype, torch.float32)]
    for engine in engines:
        run(script, engine=engine, capacity=CAPACITY, vocab_size=VOCAB_SIZE, chunk_size=4096)
    assert 4 * engines[0].kv_cache.nbytes == engines[1].kv_cache.nbytes
    assert engines[0].kv_cache.layers[0].dtype == dtype
    # The first layer's rows do not depend on the cache
    stored, plain = (cached_rows(engine)[0].float() for engine in engines)
    width = plain.shape[-1]
    scales = torch.full((width,), 0.3)
    if model.config.architecture.startswith("Llama"):
        scales[width // 2 :] = 0.2
    step = 2.0 ** -(3 + (dtype == torch.float8_e4m3fn))
    written = plain != 0
    assert written.any()
    torch.testing.assert_close((stored * scales)[written], plain[written], rtol=step, atol=1e-3)


def test_twice_the_tokens_in_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (6 << 30, 10 << 30))
    config, gpu, tokens = WorkerConfig(str(tmp_path), page_size=1), torch.device("cuda"), []
    empty = capacity_without_pages(config, 128, None, gpu)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        specs = read_config(tmp_path).kv_cache_specs(dtype)
        with caplog.at_level("INFO"):
            capacity = plan_capacity(config, empty, specs, gpu)
        tokens.append(capacity.max_total_tokens)
    assert tokens[1] == pytest.approx(2 * tokens[0], abs=1)
    assert f"KV cache: float8_e4m3fn, {tokens[1]} tokens" in caplog.text


@pytest.mark.parametrize(("name", "dtype"), [*FORMATS.items(), ("auto", torch.float32)])
def test_the_flag(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    config = WorkerConfig(str(tmp_path), device="cpu", max_total_tokens=64, kv_cache_dtype=name)
    engine = load_engine(config)
    assert engine.kv_cache_dtype == dtype
    assert {layer.dtype for layer in engine.kv_cache.layers} == {dtype}


def test_old_gpus_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    model, gpu = read_config(tmp_path), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(supported, "limits", lambda _: A100)
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8_e4m3 on a GPU: .* 8\.9, not 8\.0"):
        check_device(gpu, model, torch.bfloat16, torch.float8_e4m3fn)
    check_device(gpu, model, torch.bfloat16, torch.float8_e5m2)
    for found in (L40S, H200):
        monkeypatch.setattr(supported, "limits", lambda _, found=found: found)
        check_device(gpu, model, torch.bfloat16, torch.float8_e4m3fn)
