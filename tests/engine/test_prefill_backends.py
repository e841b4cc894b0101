"""Latent prefill in passes over parts of the keys gives what one pass over all of them does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.engine.attention.layout import ChunkExtent, StepLayout
from mla_router.worker.engine.attention.torch import TorchBackend
from mla_router.worker.engine.attention.triton import TritonBackend

HEADS, RANK, NOPE, ROPE, VALUE = 2, 6, 4, 2, 3


@pytest.mark.parametrize("most_keys", [1000, 40, 7, 1])
def test_as_torch(most_keys: int) -> None:
    """On a CPU, where each op takes its torch way: what is tested is what they are given."""
    torch.manual_seed(most_keys)
    page_table = (torch.randperm(32).int() + 1).view(4, 8)
    cache = torch.randn(33, 4, RANK + ROPE)
    weight = torch.randn(HEADS * (NOPE + VALUE), RANK)
    empty = torch.empty(0, dtype=torch.int64)
    chunks = (ChunkExtent(2, 0, 9), ChunkExtent(0, 20, 1), ChunkExtent(3, 11, 5))
    layout = StepLayout(page_table, empty, empty.int(), 0, chunks)
    q = torch.randn(15, HEADS, NOPE + ROPE)
    expanded: list[int] = []

    def expand(latent: Tensor) -> Tensor:
        expanded.append(len(latent))
        return (latent @ weight.T).view(len(latent), HEADS, -1)

    ours = TritonBackend(HEADS, NOPE + VALUE, torch.device("cpu"))
    ours.max_keys = most_keys
    expected, got = (
        backend.plan(layout).mla_prefill(q, cache, expand, kv_lora_rank=RANK, scale=0.5)
        for backend in (TorchBackend(), ours)
    )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    whole, *passes = expanded
    assert sum(passes) == whole == 46
    assert max(passes) <= max(most_keys, len(q))
