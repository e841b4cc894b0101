"""Why the flashinfer backend cannot be had is said when the worker starts; decode beside it is our own."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import Tensor

from mla_router.worker.config import ConfigError
from mla_router.worker.engine.attention import flashinfer, triton
from mla_router.worker.engine.attention.flashinfer import (
    HEAD_WIDTHS,
    FlashInferBackend,
    RaggedWrappers,
    check_heads,
)
from mla_router.worker.engine.attention.layout import StepLayout
from mla_router.worker.engine.attention.triton import TritonBackend
from mla_router.worker.kernels.attention.mla_decode import mla_decode_torch, mla_decode_triton
from mla_router.worker.kernels.attention.shared_prefixes import shared_prefixes

CPU = torch.device("cpu")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"pip install 'mla-router\[flashinfer\]'"):
        RaggedWrappers(16, torch.bfloat16, CPU)


def test_heads_of_another_width() -> None:
    check_heads(192, 128)
    with pytest.raises(ConfigError, match=r"heads \(192, 128\) wide, not \(128, 128\)"):
        check_heads(128, 128)


class Wrapper:
    """In the place of FlashInfer's, without what needs its GPU."""

    def __init__(self, workspace: Tensor, backend: str) -> None:
        del workspace, backend

    def plan(self, *args: object, **options: object) -> None:
        """Nothing is prefilled here."""


def test_decode_beside_it_reads_common_prefixes_once_and_own_rows_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flashinfer, "flashinfer_class", lambda *_: Wrapper)
    # Worth it from the first row of a few requests on
    monkeypatch.setattr(triton, "LOOK_FROM", 4)
    everything = partial(shared_prefixes, worth_it=(1, 1))
    monkeypatch.setattr(triton, "shared_prefixes", everything)
    monkeypatch.setattr(triton, "mla_decode", mla_decode_triton)
    torch.manual_seed(0)
    rows, heads, latent, rotary, length = 11, 2, 32, 16, 100
    pages = 1 + torch.arange(rows * 7, dtype=torch.int32).view(rows, 7)
    pages[:, :4] = pages[0, :4]
    lengths = torch.full((rows,), length, dtype=torch.int32)
    cache = torch.randn(rows * 7 + 1, 16, latent + rotary)
    layout = StepLayout(pages, 16, torch.arange(rows), lengths, length)
    q = torch.randn(rows, heads, latent + rotary).split([latent, rotary], dim=-1)
    ours = TritonBackend.for_latents(heads, 8, CPU)
    step = FlashInferBackend(ours, heads, *HEAD_WIDTHS, torch.float32, CPU).plan(layout)
    assert step.prefixes is not None, "nothing in common was found"
    got = step.mla_decode(*q, cache, scale=0.3)
    expected = mla_decode_torch(
        *q, cache, pages, layout.decode_slots, lengths, max_length=length, scale=0.3
    )
    torch.testing.assert_close(got, expected)
