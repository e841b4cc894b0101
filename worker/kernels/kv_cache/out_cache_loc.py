"""The cache rows of new tokens (slot_mapping in vLLM), and the other inputs of a step's rows. Both are looked up once a
step, for all layers.

They are a few integers a row. Plain torch operations would be ten kernels, which take a decode step of one request
longer than the attention of a layer. Here they are one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.step.plan import RowKind

_BLOCK = 128


class LookedUp(NamedTuple):
    """The inputs of B rows, [B] each."""

    slots: Tensor  # int64
    lengths: Tensor  # int32, tokens in the cache including the row's own
    tokens: Tensor  # int64
    positions: Tensor  # int64, of the row's token: length - 1
    out_cache_loc: Tensor  # int64, the cache row of the row's token: page * page_size + offset


def prompt_out_cache_loc(
    page_table: Tensor, prompt: Tensor, rows: int, *, page_size: int
) -> Tensor:
    """Returns the rows in the flattened cache, [rows] int64, of a prompt's tokens from its beginning on; 0 after its
    end. `prompt` [2] int64: slot and length."""
    locate = prompt_out_cache_loc_triton if page_table.is_cuda else prompt_out_cache_loc_torch
    return locate(page_table, prompt, rows, page_size=page_size)


def look_up(
    rows: Tensor,
    kinds: Tensor,
    last_token: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    into: LookedUp | None = None,
) -> LookedUp:
    """Returns the inputs of rows of any kind. `kinds` [B] int8: their `RowKind`s. `rows` [3, B] int64, contiguous: slots,
    lengths and tokens.

    A row of a chunk has its length and token in `rows`. A decode row has those of its slot: in `lengths` [all slots]
    int32, but at most that of `rows`, and in `last_token` [all slots] int64. A row of draft i = 1, 2, ... has i as its
    token in `rows`; its token is in `drafts` [all slots, D] int64, i positions after the last one. Beyond the length
    in `rows` a slot may have no pages: a row whose token is there has location and position 0. It keeps its length,
    from which attention derives those of its slot's other rows. An idle row has length 1 and location 0. page_table
    [all slots, P] int32. `into`: tensors of B rows to write to.
    """
    op = look_up_triton if page_table.is_cuda else look_up_torch
    return op(rows, kinds, last_token, drafts, lengths, page_table, page_size=page_size, into=into)


def window_cache_loc(page_table: Tensor, rows: LookedUp, *, page_size: int) -> Tensor:
    """Returns the location of each of `rows` by another page table [all slots, P] int32, [B] int64: of pages that layers
    with a window have for themselves. A row whose out_cache_loc is 0 has location 0."""
    locate = window_cache_loc_triton if page_table.is_cuda else window_cache_loc_torch
    return locate(page_table, rows, page_size=page_size)


def prompt_out_cache_loc_torch(
    page_table: Tensor, prompt: Tensor, rows: int, *, page_size: int
) -> Tensor:
    slot, length = prompt.unbind()
    positions = torch.arange(rows, device=prompt.device)
    exists = positions < length
    positions = torch.where(exists, positions, 0)
    at = _locations_torch(page_table, slot.expand(rows), positions, page_size)
    return torch.where(exists, at, 0)


def look_up_torch(
    rows: Tensor,
    kinds: Tensor,
    last_token: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    into: LookedUp | None = None,
) -> LookedUp:
    slots, own_lengths, own_tokens = rows.unbind()
    is_decode, is_draft = kinds == RowKind.DECODE, kinds == RowKind.DRAFT
    known = lengths[slots].long()
    ranks = torch.where(is_draft, own_tokens, 0)
    of_slot = is_decode | is_draft
    is_idle = (kinds == RowKind.IDLE) | (of_slot & (known + ranks > own_lengths))
    own_lengths = torch.where(of_slot, torch.minimum(known, own_lengths) + ranks, own_lengths)
    own_lengths = torch.where(kinds == RowKind.IDLE, 1, own_lengths)
    positions = torch.where(is_idle, 0, own_lengths - 1)
    tokens = torch.where(is_decode, last_token[slots], own_tokens)
    tokens = torch.where(is_draft, drafts[slots, (ranks - 1).clamp_min(0)], tokens)
    out_cache_loc = _locations_torch(page_table, slots, positions, page_size)
    found = LookedUp(
        slots,
        own_lengths.to(torch.int32),
        tokens,
        positions,
        torch.where(is_idle, 0, out_cache_loc),
    )
    if into is None:
        return found
    for there, here in zip(into, found, strict=True):
        there.copy_(here)
    return into


def window_cache_loc_torch(page_table: Tensor, rows: LookedUp, *, page_size: int) -> Tensor:
    at = _locations_torch(page_table, rows.slots, rows.positions, page_size)
    return torch.where(rows.out_cache_loc == 0, 0, at)


def _locations_torch(
    page_table: Tensor, slots: Tensor, positions: Tensor, page_size: int
) -> Tensor:
    page = page_table[slots, positions // page_size].to(torch.int64)
    return page * page_size + positions % page_size


def prompt_out_cache_loc_triton(
    page_table: Tensor, prompt: Tensor, rows: int, *, page_size: int
) -> Tensor:
    assert prompt.shape == (2,) and prompt.is_contiguous() and page_table.stride(1) == 1, (
        f"prompt {tuple(prompt.shape)} {prompt.stride()}, page_table {page_table.stride()}"
    )
    out = prompt.new_empty(rows)
    _prompt_locations_kernel[(triton.cdiv(rows, _BLOCK),)](
        page_table,
        prompt,
        out,
        rows,
        page_table.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        **launch_options(),
    )
    return out


def look_up_triton(
    rows: Tensor,
    kinds: Tensor,
    last_token: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    into: LookedUp | None = None,
) -> LookedUp:
    count = rows.shape[1]
    assert rows.is_contiguous() and rows.shape[0] == 3 and page_table.stride(1) == 1, (
        f"rows {tuple(rows.shape)} {rows.stride()}, page_table {page_table.stride()}"
    )
    assert (kinds.shape, kinds.dtype) == ((count,), torch.int8) and kinds.is_contiguous(), (
        f"{count} rows, kinds {tuple(kinds.shape)} {kinds.dtype}"
    )
    assert last_token.stride() == lengths.stride() == (1,) and drafts.stride(1) == 1, (
        f"strides {last_token.stride()}, {lengths.stride()}, {drafts.stride()}"
    )
    if into is None:
        into = LookedUp(
            *(
                rows.new_empty(count, dtype=torch.int32 if name == "lengths" else torch.int64)
                for name in LookedUp._fields
            )
        )
    assert all(x.shape == (count,) and x.is_contiguous() for x in into), (
        f"{count} rows into {[tuple(x.shape) for x in into]}"
    )
    _look_up_kernel[(triton.cdiv(count, _BLOCK),)](
        rows,
        kinds,
        last_token,
        drafts,
        lengths,
        page_table,
        *into,
        count,
        page_table.stride(0),
        drafts.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        **launch_options(),
    )
    return into


def window_cache_loc_triton(page_table: Tensor, rows: LookedUp, *, page_size: int) -> Tensor:
    count = len(rows.slots)
    assert page_table.stride(1) == 1, f"page_table {page_table.stride()}"
    out = torch.empty_like(rows.out_cache_loc)
    _window_locations_kernel[(triton.cdiv(count, _BLOCK),)](
        page_table,
        rows.slots,
        rows.positions,
        rows.out_cache_loc,
        out,
        count,
        page_table.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        **launch_options(),
    )
    return out


_DECODE, _IDLE, _DRAFT = (
    tl.constexpr(int(kind)) for kind in (RowKind.DECODE, RowKind.IDLE, RowKind.DRAFT)
)


@triton.jit(do_not_specialize=["count", "table_stride"])
def _prompt_locations_kernel(
    page_table,
    prompt,
    out,
    count,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_previous()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot, length = tl.load(prompt), tl.load(prompt + 1)
    exists = (row < length) & (row < count)
    at = _location(page_table, table_stride, slot, row, exists, PAGE_SIZE)
    tl.store(out + row, tl.where(exists, at, 0), row < count)


# The alignment of a step's integers varies: specialized on it, a kernel would be compiled under load.
@triton.jit(
    do_not_specialize=["count", "table_stride", "draft_stride"],
    do_not_specialize_on_alignment=["rows", "kinds", "slot_lengths"],
)
def _look_up_kernel(
    rows,
    kinds,
    last_token,
    drafts,
    slot_lengths,
    page_table,
    slots,
    lengths,
    tokens,
    positions,
    out_cache_loc,
    count,
    table_stride,
    draft_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_previous()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    kind = tl.load(kinds + row, inside, other=_IDLE)
    slot = tl.load(rows + row, inside, other=0)
    length = tl.load(rows + count + row, inside, other=1)
    token = tl.load(rows + 2 * count + row, inside, other=0)
    is_decode, is_draft = kind == _DECODE, kind == _DRAFT
    of_slot = is_decode | is_draft
    known = tl.load(slot_lengths + slot, of_slot, other=1).to(tl.int64)
    last = tl.load(last_token + slot, is_decode, other=0)
    draft = tl.load(drafts + slot * draft_stride + token - 1, is_draft, other=0)
    rank = tl.where(is_draft, token, 0)
    is_idle = (kind == _IDLE) | (of_slot & (known + rank > length))
    length = tl.where(of_slot, tl.minimum(known, length) + rank, length)
    length = tl.where(kind == _IDLE, 1, length)
    position = tl.where(is_idle, 0, length - 1)
    at = _location(page_table, table_stride, slot, position, is_idle == 0, PAGE_SIZE)
    tl.store(slots + row, slot, inside)
    tl.store(lengths + row, length.to(tl.int32), inside)
    tl.store(tokens + row, tl.where(is_decode, last, tl.where(is_draft, draft, token)), inside)
    tl.store(positions + row, position, inside)
    tl.store(out_cache_loc + row, at, inside)


@triton.jit(do_not_specialize=["count", "table_stride"])
def _window_locations_kernel(
    page_table,
    slots,
    positions,
    out_cache_loc,
    out,
    count,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_previous()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = tl.load(out_cache_loc + row, row < count, other=0) != 0
    slot = tl.load(slots + row, exists, other=0)
    position = tl.load(positions + row, exists, other=0)
    at = _location(page_table, table_stride, slot, position, exists, PAGE_SIZE)
    tl.store(out + row, tl.where(exists, at, 0), row < count)


@triton.jit
def _location(page_table, table_stride, slot, position, inside, PAGE_SIZE: tl.constexpr):
    page = tl.load(page_table + slot * table_stride + position // PAGE_SIZE, inside, other=0)
    return page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
