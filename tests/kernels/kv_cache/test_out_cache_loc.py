"""compute_out_cache_loc and look_up against a dictionary of where each token was put."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_router.worker.kernels.kv_cache.out_cache_loc import (
    LookedUp,
    compute_out_cache_loc_torch,
    compute_out_cache_loc_triton,
    look_up_torch,
    look_up_triton,
    prompt_out_cache_loc_torch,
    prompt_out_cache_loc_triton,
)
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

SLOTS, PAGES = 7, 5


def page_table(draw: torch.Generator) -> Tensor:
    """Returns a page table with more columns than are read, as the engine's may be."""
    return torch.randint(1, 10_000, (SLOTS, PAGES), generator=draw, dtype=torch.int32).to(DEVICE)


def place(table: Tensor, slot: int, position: int, page_size: int) -> int:
    return int(table[slot, position // page_size]) * page_size + position % page_size


@pytest.mark.parametrize("locate", [compute_out_cache_loc_torch, compute_out_cache_loc_triton])
@settings(max_examples=20)
@given(
    count=st.sampled_from([0, 1, 5, 128, 300]),
    page_size=st.sampled_from([1, 16, 48]),
    number=st.integers(0, 99),
)
def test_where_tokens_lie(
    locate: Callable[..., Tensor], count: int, page_size: int, number: int
) -> None:
    draw = torch.Generator().manual_seed(number)
    table = page_table(draw)
    slots = torch.randint(SLOTS, (count,), generator=draw)
    positions = torch.randint(PAGES * page_size, (count,), generator=draw)
    got = locate(table, slots.to(DEVICE), positions.to(DEVICE), page_size=page_size)
    both = zip(slots.tolist(), positions.tolist(), strict=True)
    assert got.dtype == torch.int64
    assert got.tolist() == [place(table, slot, position, page_size) for slot, position in both]


@pytest.mark.parametrize("locate", [prompt_out_cache_loc_torch, prompt_out_cache_loc_triton])
@settings(max_examples=20)
@given(
    length=st.sampled_from([0, 1, 5, 128, 200]),
    spare=st.sampled_from([0, 1, 300]),
    page_size=st.sampled_from([1, 16, 48]),
    number=st.integers(0, 99),
)
def test_where_a_prompt_lies(
    locate: Callable[..., Tensor], length: int, spare: int, page_size: int, number: int
) -> None:
    """Rows behind the prompt have location 0, with and without pages for them."""
    draw = torch.Generator().manual_seed(number)
    table = page_table(draw)
    length = min(length, PAGES * page_size)
    slot = number % SLOTS
    prompt = torch.tensor([slot, length], device=DEVICE)
    got = locate(table, prompt, length + spare, page_size=page_size)
    assert got.dtype == torch.int64
    expected = [place(table, slot, position, page_size) for position in range(length)]
    assert got.tolist() == expected + [0] * spare


@pytest.mark.parametrize("op", [look_up_torch, look_up_triton])
@pytest.mark.parametrize("given_tensors", [False, True])
@settings(max_examples=20)
@given(
    count=st.sampled_from([1, 5, 128, 300]),
    page_size=st.sampled_from([1, 16]),
    number=st.integers(0, 99),
)
def test_what_decode_rows_are(
    op: Callable[..., LookedUp], given_tensors: bool, count: int, page_size: int, number: int
) -> None:
    draw = torch.Generator().manual_seed(number)
    table = page_table(draw)
    tokens = torch.randint(1 << 20, (50,), generator=draw)
    slots = torch.randint(SLOTS, (count,), generator=draw)
    lengths = torch.randint(1, PAGES * page_size + 1, (count,), generator=draw)
    places = torch.randint(50, (count,), generator=draw)
    into = None
    if given_tensors:
        into = LookedUp(*(torch.full((count,), -1, device=DEVICE) for _ in LookedUp._fields))
        into = into._replace(lengths=into.lengths.int())
    rows = torch.stack((slots, lengths, places)).to(DEVICE)
    got = op(rows, tokens.to(DEVICE), table, page_size=page_size, into=into)
    assert into is None or all(a is b for a, b in zip(got, into, strict=True))
    assert [x.dtype for x in got] == [torch.int64, torch.int32] + 3 * [torch.int64]
    assert got.slots.tolist() == slots.tolist()
    assert got.lengths.tolist() == lengths.tolist()
    assert got.tokens.tolist() == tokens[places].tolist()
    assert got.positions.tolist() == (lengths - 1).tolist()
    both = zip(slots.tolist(), got.positions.tolist(), strict=True)
    assert got.out_cache_loc.tolist() == [place(table, slot, at, page_size) for slot, at in both]


def test_wrong_shapes_are_named() -> None:
    table, rows = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int64)
    with pytest.raises(AssertionError, match=r"slots \(2,\), positions \(3,\)"):
        compute_out_cache_loc_triton(table, rows[0, :2], rows[:, 0], page_size=1)
    few = LookedUp(*5 * [rows[0, :2]])
    with pytest.raises(AssertionError, match="4 rows into"):
        look_up_triton(rows, rows[0], table, page_size=1, into=few)


def launches() -> None:
    with torch.device("meta"):
        table = torch.empty(64, 10_240, dtype=torch.int32)
        rows = torch.empty(3, 33, dtype=torch.int64)
        compute_out_cache_loc_triton(table, rows[1], rows[2], page_size=16)
        look_up_triton(rows, rows[0], table, page_size=16)
        prompt_out_cache_loc_triton(table, rows[0, :2], 1024, page_size=16)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
