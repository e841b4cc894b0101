"""Several decode rows of a slot, which verify its next tokens: the backend that reads the cache once for them gives the
results of the torch backend, for which each row is a request of its own length."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_router.worker.engine.attention import triton_attention
from mla_router.worker.engine.attention.layout import StepLayout
from mla_router.worker.engine.attention.torch import TorchBackend
from mla_router.worker.engine.attention.triton import TritonBackend
from mla_router.worker.kernels.attention.gqa_decode import gqa_decode_triton
from mla_router.worker.kernels.attention.mla_decode import mla_decode_triton
from mla_router.worker.model.config.attention_spec import (
    GroupedQueryAttentionSpec,
    LatentAttentionSpec,
)

CPU = torch.device("cpu")
HEADS, LATENT, ROPE = 2, 32, 16
LATENTS = LatentAttentionSpec(
    num_heads=HEADS,
    scale=0.3,
    kv_lora_rank=LATENT,
    qk_nope_head_dim=16,
    qk_rope_head_dim=ROPE,
    v_head_dim=16,
)
GROUPED = GroupedQueryAttentionSpec(
    num_heads=4, scale=0.3, num_kv_heads=2, head_dim=16, v_head_dim=16
)
IDLE = 4


def layout_of(queries: int) -> StepLayout:
    """Three requests, and rows of padding of length 1."""
    torch.manual_seed(queries)
    page_table = 1 + torch.randperm(40).int().view(5, 8)
    page_table[IDLE] = 0
    slots = torch.tensor([2, 0, 3, IDLE]).repeat_interleave(queries)
    ends = torch.tensor([queries, 100, 61], dtype=torch.int32).repeat_interleave(queries)
    later = torch.arange(queries - 1, -1, -1, dtype=torch.int32).repeat(3)
    lengths = torch.cat((ends - later, torch.ones(queries, dtype=torch.int32)))
    return StepLayout(page_table, 16, slots, lengths, 100, queries_per_slot=queries)


@pytest.mark.parametrize("queries", [1, 2, 5])
def test_latents(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "mla_decode", mla_decode_triton)
    layout = layout_of(queries)
    cache = torch.randn(41, 16, LATENT + ROPE)
    q = torch.randn(4 * queries, HEADS, LATENT + ROPE).split([LATENT, ROPE], dim=-1)
    backend = TritonBackend(LATENTS, CPU, torch.float32, torch.float32)
    step = backend.plan(layout)
    assert step.schedule is not None and len(step.schedule.block_starts) == 4 + 1
    got = step.mla_decode(*q, cache)
    expected = TorchBackend(LATENTS, CPU, torch.float32, torch.float32).plan(layout)
    used = 3 * queries
    torch.testing.assert_close(got[:used], expected.mla_decode(*q, cache)[:used])
    assert got.isfinite().all(), "padding"


def test_grouped_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped-query decode takes each row by itself."""
    monkeypatch.setattr(triton_attention, "gqa_decode", gqa_decode_triton)
    layout = layout_of(3)
    cache = torch.randn(41, 16, 2 * 32)
    q, got = torch.randn(12, 4, 16), torch.empty(12, 4, 16)
    expected = torch.empty_like(got)
    TritonBackend(GROUPED, CPU, torch.float32, torch.float32).plan(layout).gqa_decode(q, cache, got)
    TorchBackend(GROUPED, CPU, torch.float32, torch.float32).plan(layout).gqa_decode(
        q, cache, expected
    )
    torch.testing.assert_close(got, expected)


def test_rows_that_are_not_equally_many() -> None:
    layout = replace(layout_of(2), queries_per_slot=3)
    with pytest.raises(AssertionError, match="8 decode rows of slots with 3 queries each"):
        TritonBackend(LATENTS, CPU, torch.float32, torch.float32).plan(layout)
