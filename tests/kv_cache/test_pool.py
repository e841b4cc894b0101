"""Layers of different rows share pages, and compute what they do in pools of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from mla_router.worker.kv_cache.pool import KVCachePool
from mla_router.worker.kv_cache.spec import HeadsSpec, LatentSpec
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.deepseek import LatentAttention, latent_attention
from mla_router.worker.model.loader import load_model
from support.forward_driver import ForwardDriver, nan_caches
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


def test_latents_and_heads_share_pages(tmp_path: Path) -> None:
    """A model of which one layer keeps the keys and values that its latents expand to."""
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    model = load_model(tmp_path, device="cpu", dtype=torch.float32)
    config = model.config
    assert isinstance(config, DeepseekConfig)
    mixed = load_model(tmp_path, device="cpu", dtype=torch.float32)
    expanded = replace(config, expanded_cache=True)
    layer = mixed.model.layers[1]
    assert isinstance(layer.self_attn, LatentAttention)
    attention = latent_attention(expanded)
    attention.load_state_dict(layer.self_attn.state_dict(), assign=True)
    layer.self_attn = attention

    drivers = [ForwardDriver(model, page_size=4) for model in (model, mixed)]
    specs = list(config.kv_cache_specs(torch.float32))
    specs[1] = expanded.kv_cache_spec(1, torch.float32)
    pages, page_size = drivers[1].caches[0].shape[:2]
    drivers[1].caches = nan_caches(specs, pages - 1, page_size, CPU)
    assert len({cache.shape[-1] for cache in drivers[1].caches}) == 2
    prompt = list(range(20, 37))
    for step in (
        {"chunks": [(1, prompt), (0, prompt[3:])]},
        {"decodes": {0: 5, 1: 7}, "chunks": [(2, prompt[5:])]},
        {"decodes": {2: 9, 1: 8}},
    ):
        want, got = (driver.step(**step) for driver in drivers)  # type: ignore[arg-type]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
