"""Shared-prefix batching in decode attention, on a GPU, at V2-Lite's shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.engine.attention.layout import StepLayout
from mla_router.worker.engine.attention.triton import (
    MIN_SHARED_ROWS,
    TritonBackend,
)
from mla_router.worker.kernels.attention.shared_prefixes import (
    GROUP,
    WORTH_IT_ALL,
    find_torch,
    find_triton,
)
from mla_router.worker.model.config.attention_spec import LatentAttentionSpec
from support.cuda import assert_rows_close, captured, forbid_waiting
from support.paged_cache import PagedCache, expected_attention, random_cache

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
HEADS, LATENT, ROPE, SCALE = 16, 512, 64, 0.1147
# Runs of adjacent requests, and the numbers of their common first rows
RUNS = [(40, 4096), (3, 1100), (30, 3000), (1, 0), (24, 64), (34, 2048)]
SPEC = LatentAttentionSpec(
    num_heads=HEADS,
    scale=SCALE,
    kv_lora_rank=LATENT,
    qk_nope_head_dim=128,
    qk_rope_head_dim=ROPE,
    v_head_dim=128,
)


@pytest.fixture(params=[16, 64])
def paged(request: pytest.FixtureRequest) -> PagedCache:
    """Requests with few and with many rows of their own."""
    page_size = request.param
    lengths = [max(common, 1) + 150 * i % 700 + i % 2 for run, common in RUNS for i in range(run)]
    draw = torch.Generator("cuda").manual_seed(page_size)
    paged = random_cache(
        lengths, page_size, LATENT + ROPE, dtype=torch.bfloat16, generator=draw, device="cuda"
    )
    start = 0
    for run, common in RUNS:
        paged.share(range(start, start + run), common // page_size)
        start += run
    return paged


def attend(paged: PagedCache, q: Tensor, max_length: int) -> Tensor:
    layout = StepLayout(
        paged.page_table, paged.cache.shape[1], paged.slots, paged.lengths, max_length
    )
    attention = TritonBackend(SPEC, CUDA, torch.bfloat16, torch.bfloat16).plan(layout)
    assert attention.prefixes is not None
    torch.zeros(1, device="cuda")  # what a step's embedding is between plan and layers (`pdl.py`)
    return attention.mla_decode(*q.split([LATENT, ROPE], dim=-1), paged.cache)


def queries(paged: PagedCache) -> Tensor:
    assert len(paged.rows) >= MIN_SHARED_ROWS
    return torch.randn(len(paged.rows), HEADS, LATENT + ROPE, device="cuda").bfloat16()


def test_float64(paged: PagedCache) -> None:
    q, longest = queries(paged), int(paged.lengths.max())
    expected = expected_attention(q, paged, LATENT, SCALE, 1)
    for _ in range(3):
        with forbid_waiting():
            got = attend(paged, q, longest)
        assert_rows_close(got, expected)


def test_a_recording_follows_the_pages(paged: PagedCache) -> None:
    """The graph is captured without common prefixes and replayed with them."""
    q, longest = queries(paged), int(paged.lengths.max())
    slots, lengths = paged.slots.clone(), paged.lengths.clone()
    paged.slots.fill_(paged.idle_slot())
    paged.lengths.fill_(1)
    paged.cache[0] = 0
    replay, out = captured(lambda: attend(paged, q, longest))
    paged.slots.copy_(slots)
    paged.lengths.copy_(lengths)
    for _ in range(3):
        replay()
        assert_rows_close(out, expected_attention(q, paged, LATENT, SCALE, 1))


def test_found(paged: PagedCache) -> None:
    page_size = paged.cache.shape[1]
    common = [
        find(paged.page_table, paged.slots, paged.lengths, page_size=page_size, at_least=512)
        for find in (find_triton, find_torch)
    ]
    assert torch.equal(*common)
    assert 0 < common[0].count_nonzero() < len(common[0])
    # Of groups that lie in one run; the shortest request has no rows more, and keeps the last for itself
    whole = 4096 // page_size
    assert set(common[0][: 40 // GROUP].tolist()) == {whole - 1, whole}
    assert common[0].sum() * page_size > WORTH_IT_ALL
