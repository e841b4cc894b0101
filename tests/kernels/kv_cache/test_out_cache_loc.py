"""prompt_out_cache_loc and look_up against a dictionary of where each token was put."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_router.worker.kernels.kv_cache.out_cache_loc import (
    LookedUp,
    look_up_torch,
    look_up_triton,
    prompt_out_cache_loc_torch,
    prompt_out_cache_loc_triton,
    window_cache_loc_torch,
    window_cache_loc_triton,
)
from mla_router.worker.step.plan import RowKind
from support.examples import examples
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

SLOTS, PAGES, DRAFTS = 7, 5, 3


def page_table(draw: torch.Generator) -> Tensor:
    """Returns a page table with more columns than are read, as the engine's may be."""
    return torch.randint(1, 10_000, (SLOTS, PAGES), generator=draw, dtype=torch.int32).to(DEVICE)


def place(table: Tensor, slot: int, position: int, page_size: int) -> int:
    return int(table[slot, position // page_size]) * page_size + position % page_size


@pytest.mark.parametrize("locate", [prompt_out_cache_loc_torch, prompt_out_cache_loc_triton])
@examples(20)
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
@examples(20)
@given(
    count=st.sampled_from([1, 5, 128, 300]),
    page_size=st.sampled_from([1, 16]),
    number=st.integers(0, 99),
)
def test_the_inputs_of_rows(
    op: Callable[..., LookedUp], given_tensors: bool, count: int, page_size: int, number: int
) -> None:
    """A decode row has the token of its slot, and the smaller one of the slot's length and its own. A draft is behind its
    slot's last token. Neither is written if its token is behind its own length."""
    draw = torch.Generator().manual_seed(number)
    table = page_table(draw)

    def integers(low: int, high: int, size: int = count) -> Tensor:
        return torch.randint(low, high, (size,), generator=draw)

    longest = PAGES * page_size
    last_token, known = integers(0, 1 << 20, SLOTS), integers(1, longest + 1, SLOTS)
    slots, lengths, tokens = integers(0, SLOTS), integers(1, longest + 1), integers(0, 1 << 20)
    kinds = integers(0, len(RowKind)).to(torch.int8)
    ranks = integers(1, DRAFTS + 1)
    tokens = torch.where(kinds == RowKind.DRAFT, ranks, tokens)
    drafts = integers(0, 1 << 20, SLOTS * DRAFTS).view(SLOTS, DRAFTS)
    into = None
    if given_tensors:
        into = LookedUp(*(torch.full((count,), -1, device=DEVICE) for _ in LookedUp._fields))
        into = into._replace(lengths=into.lengths.int())
    rows = torch.stack((slots, lengths, tokens)).to(DEVICE)
    state = last_token.to(DEVICE), drafts.to(DEVICE), known.int().to(DEVICE), table
    got = op(rows, kinds.to(DEVICE), *state, page_size=page_size, into=into)
    assert into is None or all(a is b for a, b in zip(got, into, strict=True))
    assert [x.dtype for x in got] == [torch.int64, torch.int32] + 3 * [torch.int64]
    assert got.slots.tolist() == slots.tolist()
    for row, kind in enumerate(kinds.tolist()):
        slot, length, token = int(slots[row]), int(lengths[row]), int(tokens[row])
        bound, ahead = length, int(known[slot])
        if kind == RowKind.IDLE:
            ahead, bound, length = 2, 1, 1
        elif kind == RowKind.DECODE:
            length, token = min(ahead, bound), int(last_token[slot])
        elif kind == RowKind.DRAFT:
            length, ahead = min(ahead, bound) + token, ahead + token
            token = int(drafts[slot, token - 1])
        else:
            ahead = length
        position, location = 0, 0
        if ahead <= bound:
            position = length - 1
            location = place(table, slot, position, page_size)
        assert (got.lengths[row], got.positions[row]) == (length, position)
        assert got.out_cache_loc[row] == location
        if kind != RowKind.IDLE:
            assert got.tokens[row] == token


@pytest.mark.parametrize("op", [window_cache_loc_torch, window_cache_loc_triton])
@pytest.mark.parametrize(("count", "page_size"), [(1, 1), (5, 16), (300, 16)])
def test_locations_in_another_page_table(
    op: Callable[..., Tensor], count: int, page_size: int
) -> None:
    """The table is a part of a wider one. Idle rows, at location 0, stay there."""
    draw = torch.Generator().manual_seed(count)
    wide = torch.randint(1, 10_000, (SLOTS, 2 * PAGES), generator=draw, dtype=torch.int32)
    table = wide.to(DEVICE)[:, PAGES:]
    slots = torch.randint(0, SLOTS, (count,), generator=draw)
    positions = torch.randint(0, PAGES * page_size, (count,), generator=draw)
    elsewhere = torch.randint(0, 2, (count,), generator=draw) * 77
    nothing = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    rows = LookedUp(
        slots.to(DEVICE), nothing.int(), nothing, positions.to(DEVICE), elsewhere.to(DEVICE)
    )
    got = op(table, rows, page_size=page_size)
    expected = [
        place(table, slot, position, page_size) if exists else 0
        for slot, position, exists in zip(
            slots.tolist(), positions.tolist(), elsewhere.tolist(), strict=True
        )
    ]
    assert got.tolist() == expected


def test_wrong_shapes_are_named() -> None:
    table, rows = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int64)
    kinds, lengths = torch.zeros(4, dtype=torch.int8), table[0]
    with pytest.raises(AssertionError, match=r"4 rows, kinds \(3,\)"):
        look_up_triton(rows, kinds[:3], rows[0], rows, lengths, table, page_size=1)
    few = LookedUp(*5 * [rows[0, :2]])
    with pytest.raises(AssertionError, match="4 rows into"):
        look_up_triton(rows, kinds, rows[0], rows, lengths, table, page_size=1, into=few)


def launches() -> None:
    with torch.device("meta"):
        table = torch.empty(64, 10_240, dtype=torch.int32)
        rows, kinds = torch.empty(3, 33, dtype=torch.int64), torch.empty(33, dtype=torch.int8)
        look_up_triton(rows, kinds, rows[0], rows, rows[0].int(), table, page_size=16)
        prompt_out_cache_loc_triton(table, rows[0, :2], 1024, page_size=16)
        own = LookedUp(rows[0], rows[0].int(), rows[0], rows[0], rows[0])
        window_cache_loc_triton(table, own, page_size=16)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
