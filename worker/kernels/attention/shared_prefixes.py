"""Shared-prefix batching: rows of the cache that neighbouring requests of a decode step have in common are read once.

Requests with a common prefix have the same pages for it. Decode attention is bound by reading rows. So a group of
requests reads the common rows once, with the queries of all requests (Juravsky et al., 2024, "Hydragen",
arXiv:2402.05099; Ye et al., 2024, "Cascade inference", flashinfer.ai). Each request then reads its own rows, and the
results are merged. The device finds the common rows in the page table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.attention.decode_schedule import DecodeSchedule, decode_schedule
from mla_router.worker.kernels.attention.decode_tiling import Tiling
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous

# Requests of a group: with 16 heads each they fill a tile of the tensor cores
GROUP = 4
PAGES_AT_ONCE = 256
# Common rows of one group, and of all groups, from which one more launch and one more partial result to merge pay
# (docs/design/kernel_choices.md)
WORTH_IT, WORTH_IT_ALL = 512, 1 << 16


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The common rows of each group of GROUP requests, and the other rows of each of R requests. Requests after the
    last whole group have no common rows."""

    lengths: Tensor  # [R // GROUP] int32, common rows; 0 if they are few
    slots: Tensor  # [R // GROUP] int64, the slot of one request of each group
    own_lengths: Tensor  # [R] int32, rows after the common ones, at least one
    skipped: Tensor  # [R] int32, pages of the common rows
    schedule: DecodeSchedule  # of `lengths`


def shared_prefixes(
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    *,
    page_size: int,
    max_length: int,
    tiling: Tiling,
    num_parts: int,
    worth_it: tuple[int, int] = (WORTH_IT, WORTH_IT_ALL),
) -> SharedPrefixes:
    """Finds the common rows. page_table [all slots, P] int32, slots [R] int64, lengths [R] int32, at most max_length.
    Fewer common rows than `worth_it`, of a group and of all groups, count as none. Runs once a step; does not wait for
    the device."""
    find = find_triton if lengths.is_cuda else find_torch
    each, total = worth_it
    common = find(page_table, slots, lengths, page_size=page_size, at_least=each)
    common = common * (common.sum() * page_size >= total)
    groups = len(common)
    skipped = torch.zeros_like(lengths)
    skipped[: groups * GROUP] = common.repeat_interleave(GROUP)
    shared = common * page_size
    schedule = decode_schedule(shared, max_length=max_length, tiling=tiling, num_parts=num_parts)
    return SharedPrefixes(
        shared,
        slots[: groups * GROUP : GROUP].contiguous(),
        lengths - skipped * page_size,
        skipped,
        schedule,
    )


def find_torch(
    page_table: Tensor, slots: Tensor, lengths: Tensor, *, page_size: int, at_least: int
) -> Tensor:
    """Returns the common pages of each group, [R // GROUP] int32."""
    groups = len(slots) // GROUP
    pages = page_table[slots[: groups * GROUP]].view(groups, GROUP, page_table.shape[1])
    same = (pages == pages[:, :1]).all(1).int().cumprod(1).sum(1)
    most = (lengths[: groups * GROUP].view(groups, GROUP).amin(1) - 1) // page_size
    common = torch.minimum(same, most)
    return torch.where(common * page_size < at_least, 0, common).int()


def find_triton(
    page_table: Tensor, slots: Tensor, lengths: Tensor, *, page_size: int, at_least: int
) -> Tensor:
    groups = len(slots) // GROUP
    common = lengths.new_empty(groups)
    _find[(groups,)](
        page_table,
        slots,
        lengths,
        common,
        page_table.stride(0),
        at_least,
        PAGE_SIZE=page_size,
        GROUP=GROUP,
        PAGES=PAGES_AT_ONCE,
        num_warps=4,
        **launch_options(),
    )
    return common


@triton.jit(do_not_specialize=["page_table_stride", "at_least"])
def _find(
    page_table,
    slots,
    lengths,
    common,
    page_table_stride,
    at_least,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Finds the common pages of one group. Reads until two requests differ."""
    wait_for_previous()
    group = tl.program_id(0)
    request = group * GROUP + tl.arange(0, GROUP)
    # Each request keeps at least its newest row
    most = (tl.min(tl.load(lengths + request), 0) - 1) // PAGE_SIZE
    tables = page_table + tl.load(slots + request)[:, None] * page_table_stride
    first = page_table + tl.load(slots + group * GROUP) * page_table_stride
    count = 0
    start = 0
    while (count == start) & (start < most):
        page = start + tl.arange(0, PAGES)
        inside = page < most
        own = tl.load(tables + page[None, :], mask=inside[None, :], other=0)
        other = tl.load(first + page, mask=inside, other=0)
        differs = tl.max((own != other[None, :]).to(tl.int32), 0) > 0
        count = tl.minimum(tl.min(tl.where(differs, page, start + PAGES), 0), most)
        start += PAGES
    tl.store(common + group, tl.where(count * PAGE_SIZE < at_least, 0, count))
