"""The flashinfer backend: the worker's start refuses it with the reason; its decode is ours."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from mla_router.worker.engine.attention import flashinfer, triton, triton_attention
from mla_router.worker.engine.attention.flashinfer import FlashInferBackend
from mla_router.worker.engine.attention.layout import StepLayout
from mla_router.worker.kernels.attention.mla_decode import mla_decode_torch, mla_decode_triton
from mla_router.worker.kernels.attention.shared_prefixes import shared_prefixes
from mla_router.worker.model.config.attention_spec import LatentAttentionSpec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def latents(heads: int = 16, **changes: int) -> LatentAttentionSpec:
    return replace(
        LatentAttentionSpec(
            num_heads=heads,
            scale=0.3,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        **changes,
    )


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    reason = FlashInferBackend.supports(latents(), CUDA, torch.bfloat16, torch.bfloat16)
    assert reason is not None and "pip install 'mla-router[flashinfer]'" in reason


def test_heads_of_another_width() -> None:
    reason = FlashInferBackend.supports(
        latents(qk_nope_head_dim=64), CUDA, torch.bfloat16, torch.bfloat16
    )
    assert reason == "has kernels for heads (192, 128) wide, not (128, 128)"


class Wrapper:
    """A stand-in for FlashInfer's wrapper, without a GPU."""

    def __init__(self, workspace: Tensor, backend: str) -> None:
        del workspace, backend

    def plan(self, *args: object, **options: object) -> None:
        """Plans nothing: this test has no prefill."""


def test_its_decode_reads_common_prefixes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flashinfer, "flashinfer_class", lambda *_: Wrapper)
    # Shared-prefix batching even for a few rows
    monkeypatch.setattr(triton, "MIN_SHARED_ROWS", 4)
    everything = partial(shared_prefixes, worth_it=(1, 1))
    monkeypatch.setattr(triton, "shared_prefixes", everything)
    monkeypatch.setattr(triton_attention, "mla_decode", mla_decode_triton)
    torch.manual_seed(0)
    rows, heads, latent, rotary, length = 11, 2, 32, 16, 100
    pages = 1 + torch.arange(rows * 7, dtype=torch.int32).view(rows, 7)
    pages[:, :4] = pages[0, :4]
    lengths = torch.full((rows,), length, dtype=torch.int32)
    cache = torch.randn(rows * 7 + 1, 16, latent + rotary)
    layout = StepLayout(pages, 16, torch.arange(rows), lengths, length)
    q = torch.randn(rows, heads, latent + rotary).split([latent, rotary], dim=-1)
    spec = latents(heads, kv_lora_rank=latent, qk_rope_head_dim=rotary)
    step = FlashInferBackend(spec, CPU, torch.float32, torch.float32).plan(layout)
    assert step.prefixes is not None, "nothing in common was found"
    got = step.mla_decode(*q, cache)
    expected = mla_decode_torch(
        *q, cache, pages, layout.decode_slots, lengths, max_length=length, scale=0.3
    )
    torch.testing.assert_close(got, expected)
