"""The creation of an engine from settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.loader import (
    load_engine,
)
from mla_router.worker.generation import SamplingParams
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan
from support.tiny_model import CONFIGS, write_tiny_model


def test_only_a_dummy_needs_no_weights(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    (tmp_path / "model.safetensors").unlink()
    settings = {"model_path": str(tmp_path), "device": "cpu", "max_total_tokens": 64}
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        load_engine(WorkerConfig(**settings))
    engine = load_engine(WorkerConfig(**settings, load_format="dummy"))
    assert engine.capacity.max_total_tokens == 64


def greedy(engine: Engine, prompt: tuple[int, ...], steps: int) -> list[int]:
    pages = tuple((0, index, 1 + index) for index in range(4))
    chunk = PrefillChunk(0, 0, prompt, is_last=True)
    plans = [StepPlan((), (), (chunk,), pages, (Admitted(0, SamplingParams(steps), prompt),))]
    plans += [StepPlan((0,), (len(prompt) + 1 + step,), (), (), ()) for step in range(steps)]
    return [engine.sample(engine.forward(plan)).wait().tokens[0][0] for plan in plans]


def test_disable_mla_costs_memory_and_changes_nothing_else(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    settings = {"model_path": str(tmp_path), "device": "cpu", "max_total_tokens": 64}
    absorbed = load_engine(WorkerConfig(**settings))
    expanded = load_engine(WorkerConfig(**settings, disable_mla=True))
    # 4 heads with keys of 16 + 8 and values of 24, against a latent of 32 and a rotary key of 8
    assert expanded.kv_cache.nbytes / absorbed.kv_cache.nbytes == 4 * (16 + 8 + 24) / (32 + 8)
    prompt = tuple(range(40, 70))
    assert greedy(expanded, prompt, 20) == greedy(absorbed, prompt, 20)


def test_disable_mla_is_for_models_that_have_it(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["llama_gqa"])
    with pytest.raises(ConfigError, match=r"--disable-mla: LlamaForCausalLM has no MLA"):
        load_engine(WorkerConfig(model_path=str(tmp_path), device="cpu", disable_mla=True))


def test_a_drafter_needs_a_layer_and_memory(tmp_path: Path) -> None:
    settings = {"device": "cpu", "max_total_tokens": 64}
    drafts = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
    # transformers writes no such layer, although the config of V3 has one
    for name, message in (
        ("v2_grouped", "no layers for multi-token prediction"),
        ("v3", "missing"),
    ):
        write_tiny_model(tmp_path / name, **CONFIGS[name])
        config = WorkerConfig(model_path=str(tmp_path / name), **settings, **drafts)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"--speculative-algorithm NEXTN: [\S\s]*{message}"):
            load_engine(config)
    plain = load_engine(WorkerConfig(**settings))  # type: ignore[arg-type]
    engine = load_engine(WorkerConfig(**settings, **drafts))  # type: ignore[arg-type]
    assert (plain.capacity.tokens_per_row, engine.capacity.tokens_per_row) == (1, 3)
    assert len(engine.kv_cache.layers) == len(plain.kv_cache.layers) + 1


@pytest.mark.parametrize(
    ("method", "dtype"),
    [("fp8", torch.float8_e4m3fn), ("w8a8_fp8", torch.float8_e4m3fn), ("w8a8_int8", torch.int8)],
)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_plain_weights_are_quantized_while_they_load(
    method: str, dtype: torch.dtype, load_format: str
) -> None:
    config = WorkerConfig(
        device="cpu", max_total_tokens=128, quantization=method, load_format=load_format
    )
    engine = load_engine(config)
    quantized = [p for p in engine.model.parameters() if p.dtype == dtype]
    # Projections of 4 layers of experts and one dense layer, without kv_b_proj
    assert len(quantized) == 5 * 3 + 4 * 4 + 2
    assert len(greedy(engine, tuple(range(40, 70)), 2)) == 1 + 2
