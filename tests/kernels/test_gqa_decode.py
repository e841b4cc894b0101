"""gqa_decode against attention of each head over its request's tokens alone, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_router.worker.kernels.gqa_decode import gqa_decode

WIDTH = 6


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    page_size=st.sampled_from([1, 4, 16]),
    spare=st.integers(0, 20),
    seed=st.integers(0, 100),
)
def test_formula(
    lengths: list[int], groups: int, share: int, page_size: int, spare: int, seed: int
) -> None:
    """Rows that belong to nobody are NaN, unused page table entries point to page 0."""
    draw = torch.Generator().manual_seed(seed)
    max_length = max(lengths) + spare
    per_slot = -(-max_length // page_size)
    num_slots = len(lengths) + 2
    pages = torch.randperm(num_slots * per_slot, generator=draw).to(torch.int32) + 1
    table = pages.view(num_slots, per_slot).clone()
    cache = torch.full((2, len(pages) + 1, page_size, groups, WIDTH), float("nan"))
    slots = torch.randperm(num_slots, generator=draw)[: len(lengths)]
    q = torch.randn(len(lengths), groups * share, WIDTH, generator=draw)

    expected = torch.empty(len(lengths), groups * share, WIDTH, dtype=torch.float64)
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
        keys, values = torch.randn(2, length, groups, WIDTH, generator=draw)
        for i in range(length):
            page, place = int(table[slot, i // page_size]), i % page_size
            cache[0, page, place], cache[1, page, place] = keys[i], values[i]
        table[slot, -(-length // page_size) :] = 0
        for head in range(groups * share):
            group = head // share
            weights = (keys[:, group].double() @ q[row, head].double() * 0.3).exp()
            expected[row, head] = weights / weights.sum() @ values[:, group].double()

    got = gqa_decode(
        q,
        cache[0],
        cache[1],
        table,
        slots,
        torch.tensor(lengths, dtype=torch.int32),
        max_length=max_length,
        scale=0.3,
    )
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_nan_of_one_request_does_not_reach_another() -> None:
    cache = torch.randn(2, 3, 4, 1, WIDTH)
    cache[:, 2] = float("nan")
    got = gqa_decode(
        torch.randn(2, 2, WIDTH),
        cache[0],
        cache[1],
        torch.tensor([[1, 2], [2, 0]], dtype=torch.int32),
        torch.tensor([0, 1]),
        torch.tensor([4, 3], dtype=torch.int32),
        max_length=8,
        scale=1.0,
    )
    assert got[0].isfinite().all()
    assert got[1].isnan().all()


@pytest.mark.parametrize(
    ("heads", "groups", "width"), [(3, 2, WIDTH), (2, 2, WIDTH + 1)], ids=["heads", "width"]
)
def test_wrong_shapes_are_named(heads: int, groups: int, width: int) -> None:
    keys = torch.ones(2, 4, groups, width)
    with pytest.raises(AssertionError, match=rf"q \(1, {heads}, 6\), keys \(2, 4, 2, {width}\)"):
        gqa_decode(
            torch.ones(1, heads, WIDTH),
            keys,
            keys,
            torch.ones(1, 1, dtype=torch.int32),
            torch.tensor([0]),
            torch.tensor([4], dtype=torch.int32),
            max_length=4,
            scale=1.0,
        )
