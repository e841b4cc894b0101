"""The cache rows of new tokens (slot_mapping in vLLM), and the other inputs of decode rows. Both are looked up once a
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

_BLOCK = 128


class LookedUp(NamedTuple):
    """The inputs of B decode rows, [B] each."""

    slots: Tensor  # int64
    lengths: Tensor  # int32, tokens in the cache including the row's own
    tokens: Tensor  # int64
    positions: Tensor  # int64, of the row's token: length - 1
    out_cache_loc: Tensor  # int64, the cache row of the row's token: page * page_size + offset


def compute_out_cache_loc(
    page_table: Tensor, slots: Tensor, positions: Tensor, *, page_size: int
) -> Tensor:
    """Returns the rows in the flattened cache, [T] int64, of tokens at `positions` [T] int64 of the requests in `slots`
    [T] int64. page_table [all slots, P] int32."""
    locate = compute_out_cache_loc_triton if page_table.is_cuda else compute_out_cache_loc_torch
    return locate(page_table, slots, positions, page_size=page_size)


def prompt_out_cache_loc(
    page_table: Tensor, prompt: Tensor, rows: int, *, page_size: int
) -> Tensor:
    """Returns the rows in the flattened cache, [rows] int64, of a prompt's tokens from its beginning on; 0 behind its
    end. `prompt` [2] int64: slot and length."""
    locate = prompt_out_cache_loc_triton if page_table.is_cuda else prompt_out_cache_loc_torch
    return locate(page_table, prompt, rows, page_size=page_size)


def look_up(
    rows: Tensor,
    tokens: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    into: LookedUp | None = None,
) -> LookedUp:
    """Returns the inputs of decode rows. `rows` [3, B] int64, contiguous: slots, lengths, and indices in the input-token
    buffer `tokens` [N] int64. page_table [all slots, P] int32. `into`: tensors of B rows to write to."""
    op = look_up_triton if page_table.is_cuda else look_up_torch
    return op(rows, tokens, page_table, page_size=page_size, into=into)


def compute_out_cache_loc_torch(
    page_table: Tensor, slots: Tensor, positions: Tensor, *, page_size: int
) -> Tensor:
    page = page_table[slots, positions // page_size].to(torch.int64)
    return page * page_size + positions % page_size


def prompt_out_cache_loc_torch(
    page_table: Tensor, prompt: Tensor, rows: int, *, page_size: int
) -> Tensor:
    slot, length = prompt.unbind()
    positions = torch.arange(rows, device=prompt.device)
    exists = positions < length
    positions = torch.where(exists, positions, 0)
    at = compute_out_cache_loc_torch(page_table, slot.expand(rows), positions, page_size=page_size)
    return torch.where(exists, at, 0)


def look_up_torch(
    rows: Tensor,
    tokens: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    into: LookedUp | None = None,
) -> LookedUp:
    slots, lengths, places = rows.unbind()
    positions = lengths - 1
    out_cache_loc = compute_out_cache_loc_torch(page_table, slots, positions, page_size=page_size)
    found = LookedUp(slots, lengths.to(torch.int32), tokens[places], positions, out_cache_loc)
    if into is None:
        return found
    for there, here in zip(into, found, strict=True):
        there.copy_(here)
    return into


def compute_out_cache_loc_triton(
    page_table: Tensor, slots: Tensor, positions: Tensor, *, page_size: int
) -> Tensor:
    assert slots.shape == positions.shape and page_table.stride(1) == 1, (
        f"slots {tuple(slots.shape)}, positions {tuple(positions.shape)}, {page_table.stride()}"
    )
    assert slots.is_contiguous() and positions.is_contiguous(), (
        f"strides {slots.stride()}, {positions.stride()}"
    )
    out = torch.empty_like(slots)
    _locations_kernel[(triton.cdiv(len(slots), _BLOCK),)](
        page_table,
        slots,
        positions,
        out,
        len(slots),
        page_table.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        **launch_options(),
    )
    return out


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
    tokens: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    into: LookedUp | None = None,
) -> LookedUp:
    assert rows.is_contiguous() and rows.shape[0] == 3 and page_table.stride(1) == 1, (
        f"rows {tuple(rows.shape)} {rows.stride()}, page_table {page_table.stride()}"
    )
    count = rows.shape[1]
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
        tokens,
        page_table,
        *into,
        count,
        page_table.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        **launch_options(),
    )
    return into


# The alignment of a step's integers varies: specialized on it, a kernel would be compiled under load.
@triton.jit(
    do_not_specialize=["count", "table_stride"],
    do_not_specialize_on_alignment=["slots", "positions"],
)
def _locations_kernel(
    page_table,
    slots,
    positions,
    out,
    count,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_previous()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    slot = tl.load(slots + row, inside, other=0)
    position = tl.load(positions + row, inside, other=0)
    at = _location(page_table, table_stride, slot, position, inside, PAGE_SIZE)
    tl.store(out + row, at, inside)


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


@triton.jit(
    do_not_specialize=["count", "table_stride"],
    do_not_specialize_on_alignment=["rows"],
)
def _look_up_kernel(
    rows,
    tokens,
    page_table,
    slots,
    lengths,
    row_tokens,
    positions,
    out_cache_loc,
    count,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_previous()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    slot = tl.load(rows + row, inside, other=0)
    length = tl.load(rows + count + row, inside, other=1)
    place = tl.load(rows + 2 * count + row, inside, other=0)
    at = _location(page_table, table_stride, slot, length - 1, inside, PAGE_SIZE)
    tl.store(slots + row, slot, inside)
    tl.store(lengths + row, length.to(tl.int32), inside)
    tl.store(row_tokens + row, tl.load(tokens + place, inside, other=0), inside)
    tl.store(positions + row, length - 1, inside)
    tl.store(out_cache_loc + row, at, inside)


@triton.jit
def _location(page_table, table_stride, slot, position, inside, PAGE_SIZE: tl.constexpr):
    page = tl.load(page_table + slot * table_stride + position // PAGE_SIZE, inside, other=0)
    return page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
