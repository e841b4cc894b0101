"""Moves the keys and values of accepted nodes of trees of drafts to the pages of their slots.

A row of a layer is a few kilobytes, and a model has many layers. On a GPU one kernel moves the rows of all layers, by a
table of their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.kv_cache.fp8 import as_bytes
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.step.result import UNUSED

_BLOCK = 1024
_WORD = 4  # bytes


class Layers(NamedTuple):
    """The KV caches of all layers, [pages, page_size, width] each, those of FP8 as bytes."""

    caches: tuple[Tensor, ...]
    addresses: Tensor  # [layers] int64
    words: Tensor  # [layers] int32, of 4 bytes, in a row
    most_words: int  # of them

    @classmethod
    def of(cls, caches: Sequence[Tensor]) -> Layers:
        sizes = [cache.shape[-1] * cache.element_size() for cache in caches]
        assert all(cache.is_contiguous() for cache in caches), "caches that are views"
        assert all(size % _WORD == 0 for size in sizes), f"rows of {sizes} bytes"
        words, device = [size // _WORD for size in sizes], caches[0].device
        return cls(
            tuple(as_bytes(cache) for cache in caches),
            torch.tensor([cache.data_ptr() for cache in caches], device=device),
            torch.tensor(words, dtype=torch.int32, device=device),
            max(words),
        )


def move_rows(
    layers: Layers,
    path: Tensor,
    slots: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    *,
    first_row: int,
    nodes: int,
) -> None:
    """Moves the rows of the nodes in `path` [D, n] int64, UNUSED after the last one, for D slots: in each layer row
    `first_row` + i * `nodes` + node of slot i. `slots` [D] int64; `lengths` [all slots] int32: tokens with those that the
    step gave, as many as there are nodes in the path, of which the last one has no row yet; page_table [all slots, P]
    int32. A path without nodes moves nothing."""
    op = move_rows_triton if path.is_cuda else move_rows_torch
    op(layers, path, slots, lengths, page_table, first_row=first_row, nodes=nodes)


def move_rows_torch(
    layers: Layers,
    path: Tensor,
    slots: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    *,
    first_row: int,
    nodes: int,
) -> None:
    count, page_size = path.shape[0], layers.caches[0].shape[1]
    accepted = path != UNUSED
    gained = accepted.sum(dim=1, keepdim=True)
    steps = torch.arange(path.shape[1], device=path.device)
    positions = lengths[slots].long()[:, None] - gained - 1 + steps
    positions = torch.where(accepted, positions, 0)
    pages = page_table[slots].gather(1, positions // page_size).long()
    own = torch.arange(count, device=path.device)[:, None] * nodes
    # Page 0 is read by no request
    to = torch.where(accepted, pages * page_size + positions % page_size, 0).flatten()
    source = torch.where(accepted, first_row + own + path, 0).flatten()
    for cache in layers.caches:
        rows = cache.view(-1, cache.shape[-1])
        rows.index_copy_(0, to, rows.index_select(0, source))


def move_rows_triton(
    layers: Layers,
    path: Tensor,
    slots: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    *,
    first_row: int,
    nodes: int,
) -> None:
    count, most = path.shape
    assert path.is_contiguous() and slots.is_contiguous() and page_table.stride(1) == 1, (
        f"path {path.stride()}, slots {slots.stride()}, page_table {page_table.stride()}"
    )
    if not count:
        return
    _move_kernel[(count * most, len(layers.caches))](
        layers.addresses,
        layers.words,
        path,
        slots,
        lengths,
        page_table,
        page_table.stride(0),
        first_row,
        nodes,
        MOST=most,
        WIDTH=triton.next_power_of_2(most),
        PAGE_SIZE=layers.caches[0].shape[1],
        MOST_WORDS=layers.most_words,
        BLOCK=_BLOCK,
        UNUSED_NODE=UNUSED,
        **launch_options(),
    )


@triton.jit(
    do_not_specialize=["table_stride", "first_row", "nodes"],
    do_not_specialize_on_alignment=["path", "slots"],
)
def _move_kernel(
    addresses,
    words,
    path,
    slots,
    lengths,
    page_table,
    table_stride,
    first_row,
    nodes,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MOST_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNUSED_NODE: tl.constexpr,
):
    wait_for_previous()
    at, step = tl.program_id(0) // MOST, tl.program_id(0) % MOST
    steps = tl.arange(0, WIDTH)
    on_path = tl.load(path + at * MOST + steps, steps < MOST, other=UNUSED_NODE)
    gained = tl.sum((on_path != UNUSED_NODE).to(tl.int32), 0)
    if step < gained:
        node = tl.load(path + at * MOST + step)
        slot = tl.load(slots + at)
        position = tl.load(lengths + slot) - gained - 1 + step
        page = tl.load(page_table + slot * table_stride + position // PAGE_SIZE).to(tl.int64)
        size = tl.load(words + tl.program_id(1))
        cache = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(tl.int32))
        source = cache + (first_row + at * nodes + node) * size
        to = cache + (page * PAGE_SIZE + position % PAGE_SIZE) * size
        for start in tl.static_range(0, MOST_WORDS, BLOCK):
            word = start + tl.arange(0, BLOCK)
            tl.store(to + word, tl.load(source + word, word < size), word < size)
