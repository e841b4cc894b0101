"""mla_decode against attention over each request's rows alone, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_router.worker.kernels.mla_decode import mla_decode

LATENT, ROPE = 12, 4


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    heads=st.integers(1, 4),
    page_size=st.sampled_from([1, 4, 16]),
    spare=st.integers(0, 20),
    seed=st.integers(0, 100),
)
def test_formula(lengths: list[int], heads: int, page_size: int, spare: int, seed: int) -> None:
    """Rows that belong to nobody are NaN, unused page table entries point to page 0."""
    draw = torch.Generator().manual_seed(seed)
    max_length = max(lengths) + spare
    per_slot = -(-max_length // page_size)
    num_slots = len(lengths) + 2
    pages = torch.randperm(num_slots * per_slot, generator=draw).to(torch.int32) + 1
    table = pages.view(num_slots, per_slot).clone()
    cache = torch.full((len(pages) + 1, page_size, LATENT + ROPE), float("nan"))
    slots = torch.randperm(num_slots, generator=draw)[: len(lengths)]
    q = torch.randn(len(lengths), heads, LATENT + ROPE, generator=draw)

    expected = torch.empty(len(lengths), heads, LATENT, dtype=torch.float64)
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
        rows = torch.randn(length, LATENT + ROPE, generator=draw)
        for i in range(length):
            cache[int(table[slot, i // page_size]), i % page_size] = rows[i]
        table[slot, -(-length // page_size) :] = 0
        for head in range(heads):
            weights = (rows.double() @ q[row, head].double() * 0.3).exp()
            expected[row, head] = weights / weights.sum() @ rows[:, :LATENT].double()

    got = mla_decode(
        q,
        cache,
        table,
        slots,
        torch.tensor(lengths, dtype=torch.int32),
        max_length=max_length,
        kv_lora_rank=LATENT,
        scale=0.3,
    )
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_nan_of_one_request_does_not_reach_another() -> None:
    cache = torch.randn(3, 4, LATENT + ROPE)
    cache[2] = float("nan")
    got = mla_decode(
        torch.randn(2, 1, LATENT + ROPE),
        cache,
        torch.tensor([[1, 2], [2, 0]], dtype=torch.int32),
        torch.tensor([0, 1]),
        torch.tensor([4, 3], dtype=torch.int32),
        max_length=8,
        kv_lora_rank=LATENT,
        scale=1.0,
    )
    assert got[0].isfinite().all()
    assert got[1].isnan().all()


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(AssertionError, match=r"q \(1, 1, 16\), cache \(2, 4, 15\)"):
        mla_decode(
            torch.ones(1, 1, 16),
            torch.ones(2, 4, 15),
            torch.ones(1, 1, dtype=torch.int32),
            torch.tensor([0]),
            torch.tensor([4], dtype=torch.int32),
            max_length=4,
            kv_lora_rank=LATENT,
            scale=1.0,
        )
