"""Prefill in passes over parts of the keys gives what one pass over all of them does.

On a CPU, where each op takes its torch way: what is tested is what they are given.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.engine.attention.layout import ChunkExtent, StepLayout
from mla_router.worker.engine.attention.torch import TorchBackend
from mla_router.worker.engine.attention.triton import TritonBackend
from mla_router.worker.model.config.cache_rows import HeadRows

HEADS, RANK, NOPE, ROPE, VALUE = 2, 6, 4, 2, 3
KEY_HEADS, SHARE = 2, 3
CPU = torch.device("cpu")
CHUNKS = (ChunkExtent(2, 0, 9), ChunkExtent(0, 20, 1), ChunkExtent(3, 11, 5))


@pytest.fixture
def layout() -> StepLayout:
    torch.manual_seed(0)
    page_table = (torch.randperm(32).int() + 1).view(4, 8)
    empty = torch.empty(0, dtype=torch.int64)
    return StepLayout(page_table, empty, empty.int(), 0, CHUNKS)


@pytest.mark.parametrize("most_keys", [1000, 40, 7, 1])
def test_latents(layout: StepLayout, most_keys: int) -> None:
    cache = torch.randn(33, 4, RANK + ROPE)
    weight = torch.randn(HEADS * (NOPE + VALUE), RANK)
    q = torch.randn(15, HEADS, NOPE + ROPE)
    expanded: list[int] = []

    def expand(latent: Tensor) -> Tensor:
        expanded.append(len(latent))
        return (latent @ weight.T).view(len(latent), HEADS, -1)

    ours = TritonBackend.for_latents(HEADS, NOPE + VALUE, CPU)
    ours.max_keys = most_keys
    results = []
    for backend in (TorchBackend(), ours):
        results.append(torch.full((15, HEADS, VALUE), float("nan")))
        step = backend.plan(layout)
        step.mla_prefill(q, cache, expand, results[-1], kv_lora_rank=RANK, scale=0.5)
    torch.testing.assert_close(*reversed(results), rtol=1e-4, atol=1e-5)
    whole, *passes = expanded
    assert sum(passes) == whole == 46
    assert max(passes) <= max(most_keys, len(q))


@pytest.mark.parametrize("most_keys", [1000, 40, 7, 1])
def test_keys_and_values(layout: StepLayout, most_keys: int) -> None:
    width = NOPE + ROPE
    cache = torch.randn(33, 4, KEY_HEADS * (width + VALUE))
    q = torch.randn(15, KEY_HEADS * SHARE, width)
    ours = TritonBackend.for_key_heads(KEY_HEADS * SHARE, HeadRows(KEY_HEADS, width, VALUE), CPU)
    ours.max_keys = most_keys
    results = []
    for backend in (TorchBackend(), ours):
        results.append(torch.full((15, KEY_HEADS * SHARE, VALUE), float("nan")))
        backend.plan(layout).gqa_prefill(q, cache, results[-1], scale=0.5)
    torch.testing.assert_close(*reversed(results), rtol=1e-4, atol=1e-5)
