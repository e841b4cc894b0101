"""Layers with different row widths share pages, and compute the same as with separate pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch

from mla_router.worker.engine.attention.model_attention import ModelAttention
from mla_router.worker.kv_cache.pool import KVCachePool
from mla_router.worker.kv_cache.spec import HeadsSpec, LatentSpec
from mla_router.worker.model.config.attention_spec import AttentionSpec
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.decoder import DecoderLayer
from mla_router.worker.model.loader import load_model
from mla_router.worker.model.mla import NonAbsorbedAttention
from support.attention import torch_attention, triton_attention
from support.forward_driver import ForwardDriver
from support.tiny_model import CONFIGS, write_tiny_model

CPU = torch.device("cpu")


def test_each_layer_has_its_own_rows() -> None:
    latent = LatentSpec(dtype=torch.bfloat16, kv_lora_rank=32, qk_rope_head_dim=8)
    heads = HeadsSpec(dtype=torch.float32, num_kv_heads=2, head_dim=24, v_head_dim=16)
    pool = KVCachePool([latent, heads, latent], 7, 4, CPU)
    assert [tuple(layer.shape) for layer in pool.layers] == [(8, 4, 40), (8, 4, 80), (8, 4, 40)]
    assert [layer.dtype for layer in pool.layers] == [spec.dtype for spec in pool.specs]
    assert all(layer.is_contiguous() and not layer.any() for layer in pool.layers)
    assert pool.nbytes == 8 * 4 * (80 + 320 + 80)


def test_layers_with_a_window_share_memory_with_the_others() -> None:
    heads = HeadsSpec(dtype=torch.float32, num_kv_heads=2, head_dim=24, v_head_dim=16)
    local = replace(heads, window=8)
    pool = KVCachePool([local, heads, heads, local], 7, 4, CPU, own_windows=True)
    assert [layer.data_ptr() for layer in pool.layers] == [
        pool.tensors[at].data_ptr() for at in (0, 0, 1, 1)
    ]
    assert pool.nbytes == 2 * 8 * 4 * 320
    apart = KVCachePool([local, heads], 7, 4, CPU)
    assert apart.layers[0].data_ptr() != apart.layers[1].data_ptr()


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedConfig(DeepseekConfig):
    """Layer 1 keeps the expanded keys and values instead of latents."""

    def attention_spec(self, layer: int) -> AttentionSpec:
        return DeepseekConfig.attention_spec(replace(self, disable_mla=layer == 1), layer)


@pytest.mark.parametrize("attention", [torch_attention, triton_attention])
def test_latents_and_heads_share_pages(
    tmp_path: Path, attention: Callable[[ModelConfig], ModelAttention]
) -> None:
    """There is one page table, and one attention plan a step for each kind."""
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    model, mixed = (load_model(tmp_path, device="cpu", dtype=torch.float32) for _ in range(2))
    own = {field.name: getattr(model.config, field.name) for field in fields(model.config)}
    config = mixed.config = MixedConfig(**own)
    layer = mixed.model.layers[1]
    assert isinstance(layer, DecoderLayer)
    expanded = NonAbsorbedAttention(config, 1)
    expanded.load_state_dict(layer.self_attn.state_dict(), assign=True)
    layer.self_attn = expanded

    drivers = [
        ForwardDriver(model, page_size=4),
        ForwardDriver(mixed, page_size=4, attention=attention(config)),
    ]
    assert len(config.attention_specs) == 2
    assert [config.attention_index(layer) for layer in range(3)] == [0, 1, 0]
    assert len({cache.shape[-1] for cache in drivers[1].caches}) == 2
    prompt = list(range(20, 37))
    steps: list[tuple[dict[int, int], list[tuple[int, list[int]]]]] = [
        ({}, [(1, prompt), (0, prompt[3:])]),
        ({0: 5, 1: 7}, [(2, prompt[5:])]),
        ({2: 9, 1: 8}, []),
    ]
    for decodes, chunks in steps:
        want, got = (driver.step(decodes, chunks) for driver in drivers)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
