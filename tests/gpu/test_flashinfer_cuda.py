"""FlashInfer's prefill kernel gives the same results as ours."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mla_router.worker.engine.attention.flashinfer import FlashInferBackend
from mla_router.worker.engine.attention.layout import AttentionBackend, ChunkExtent, StepLayout
from mla_router.worker.engine.attention.triton import TritonBackend
from mla_router.worker.model.config.attention_spec import LatentAttentionSpec

pytestmark = pytest.mark.gpu

pytest.importorskip("flashinfer")

HEADS, RANK, NOPE, ROPE, VALUE = 16, 512, 128, 64, 128
PAGE_SIZE, NUM_SLOTS, PAGES_PER_SLOT = 64, 4, 80
DEVICE = torch.device("cuda")
SPEC = LatentAttentionSpec(
    num_heads=HEADS,
    scale=0.07,
    kv_lora_rank=RANK,
    qk_nope_head_dim=NOPE,
    qk_rope_head_dim=ROPE,
    v_head_dim=VALUE,
)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


class Model:
    """Inputs of one layer: a cache in which each slot is full, and the expansion of latents."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        pages = torch.randperm(NUM_SLOTS * PAGES_PER_SLOT, device=DEVICE).int() + 1
        self.page_table = pages.view(NUM_SLOTS, PAGES_PER_SLOT)
        self.cache = randn(len(pages) + 1, PAGE_SIZE, RANK + ROPE)
        self.weight = randn(HEADS * (NOPE + VALUE), RANK) * RANK**-0.5

    def expand(self, latent: Tensor) -> Tensor:
        return (latent @ self.weight.T).view(len(latent), HEADS, -1)

    def layout(self, chunks: Sequence[ChunkExtent]) -> StepLayout:
        empty = torch.empty(0, dtype=torch.int64, device=DEVICE)
        return StepLayout(
            self.page_table, self.cache.shape[1], empty, empty.int(), 0, tuple(chunks)
        )

    def attend(self, backend: AttentionBackend, q: Tensor, chunks: Sequence[ChunkExtent]) -> Tensor:
        step = backend.plan(self.layout(chunks))
        out = q.new_full((len(q), HEADS, VALUE), float("nan"))
        own = q.new_full((len(q), RANK + ROPE), float("nan"))  # not read: the cache has these rows
        step.mla_prefill(q, own, self.cache, self.expand, out, kv_lora_rank=RANK)
        return out


@pytest.fixture(scope="module")
def flashinfer() -> FlashInferBackend:
    assert FlashInferBackend.supports(SPEC, DEVICE, torch.bfloat16, torch.bfloat16) is None
    return FlashInferBackend(SPEC, DEVICE, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("most_keys", [100_000, 1000], ids=["one pass", "several passes"])
def test_as_ours(flashinfer: FlashInferBackend, most_keys: int) -> None:
    """Three steps in flight: each uses its own plan."""
    ours = TritonBackend(SPEC, DEVICE, torch.bfloat16, torch.bfloat16)
    ours.max_keys = flashinfer.ours.max_keys = most_keys
    model = Model()
    steps = [
        [ChunkExtent(0, 0, 700), ChunkExtent(2, 3000, 64), ChunkExtent(1, 1, 1)],
        [ChunkExtent(3, 5000, 100)],
        [ChunkExtent(1, 0, 1), ChunkExtent(0, 1000, 900)],
    ]
    queries = [randn(sum(c.length for c in step), HEADS, NOPE + ROPE) for step in steps]
    got = [model.attend(flashinfer, q, step) for q, step in zip(queries, steps, strict=True)]
    for attended, q, step in zip(got, queries, steps, strict=True):
        expected = model.attend(ours, q, step)
        error = (attended.double() - expected.double()).norm() / expected.double().norm()
        assert error <= 5e-3, (step, error)
