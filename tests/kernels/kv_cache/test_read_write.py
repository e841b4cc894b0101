"""kv_write and kv_read: rows that are written to scattered pages are read in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.kernels.kv_cache.read import kv_read
from mla_router.worker.kernels.kv_cache.write import kv_write


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 4, 16]),
    first=st.sampled_from([0, 0.5, 0.99]),
    seed=st.integers(0, 100),
)
def test_round_trip(lengths: list[int], page_size: int, first: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    per_slot = -(-20 // page_size)
    pages = torch.randperm(len(lengths) * per_slot, generator=draw).to(torch.int32) + 1
    table = pages.view(len(lengths), per_slot)
    cache = torch.full((len(pages) + 1, page_size, 3), float("nan"))
    rows = [torch.randn(length, 3, generator=draw) for length in lengths]
    out_cache_loc = [
        int(table[slot, i // page_size]) * page_size + i % page_size
        for slot, length in enumerate(lengths)
        for i in range(length)
    ]
    kv_write(cache, torch.tensor(out_cache_loc), torch.cat(rows))
    assert cache.isfinite().all(dim=-1).sum() == sum(lengths)

    order = torch.randperm(len(lengths), generator=draw).tolist()
    firsts = [int(length * first) for length in lengths]
    got = kv_read(cache, table, [(slot, firsts[slot], lengths[slot]) for slot in order])
    assert torch.equal(got, torch.cat([rows[slot][firsts[slot] :] for slot in order]))


def test_rows_take_the_dtype_of_the_cache() -> None:
    cache = torch.zeros(2, 4, 3, dtype=torch.bfloat16)
    rows = torch.tensor([[1.0, 1.00390625, -2.0]])
    kv_write(cache, torch.tensor([6]), rows)
    assert torch.equal(cache.view(-1, 3)[6], rows[0].bfloat16())


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(AssertionError, match=r"cache \(2, 4, 3\).*rows \(1, 2\)"):
        kv_write(torch.zeros(2, 4, 3), torch.tensor([6]), torch.ones(1, 2))
    with pytest.raises(AssertionError, match=r"\[\(0, 0, 9\)\], page_table \(1, 2\) x 4"):
        kv_read(torch.zeros(2, 4, 3), torch.ones(1, 2, dtype=torch.int32), [(0, 0, 9)])
