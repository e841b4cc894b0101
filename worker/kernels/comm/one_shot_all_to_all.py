"""`all_to_all.py` for few rows, between the GPUs of a machine: one kernel there and one back.

As in `one_shot.py` ranks write into each other's memory, there is no barrier, and memory without a row holds EMPTY in
each word. Each rank sends the choice of each row to all ranks. So a reader knows which rows, and later which results, are
on their way, and waits for these alone. It empties a slot when it has read it.

A choice or row has two generations of slots, used in turn. A rank that fills a slot again, in its dispatch n + 2, has
received the choices of the reader's dispatch n + 1, which the reader has sent after the end of its dispatch n. Results
have one generation: a rank that fills a slot again, after its dispatch n + 1, has received the choices that the reader
has sent after the end of its combine n. So each dispatch is followed by one combine of as many rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.comm.all_to_all import Choice, Dispatched, ExpertTables
from mla_router.worker.kernels.comm.one_shot import EMPTY, filled, is_empty
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.kernels.quantize import GROUP
from mla_router.worker.kernels.rms_norm import tiling
from mla_router.worker.kernels.weight import Activations, Quantized

# Two times -0.0 in 16 bits. As float32 it is negative, so neither a weight nor a scale. In quantized rows it is zeros
EMPTY_WORD = tl.constexpr(-0x7FFF8000)
GENERATIONS = 2
MAX_TOP_K = 32


class RowBoxes(NamedTuple):
    """The memory of one rank of `size`, for rows of at most `width` 16-bit floats, or of as many quantized numbers.

    `memory` [words] int32: slots [GENERATIONS, rows, size, slot] of rows, one for each sender; after them slots
    [rows, size, width / 2] of results. A slot has ids, weights, scales, values. `addresses` [size] int64: those of the
    memory of all ranks in this process. `turns` [rows] int32: of each row, the generation of its next dispatch.
    """

    rank: int
    size: int
    width: int
    memory: Tensor
    addresses: Tensor
    turns: Tensor

    def serve(self, width: int, dtype: torch.dtype, top_k: int, rows: int) -> bool:
        """Whether the kernels take `rows` rows of each rank, of `width` numbers of `dtype`, with `top_k` experts each."""
        is_narrow = width <= self.width and width % 4 == 0 and top_k <= MAX_TOP_K
        return is_narrow and dtype.itemsize == 2 and 0 < rows <= len(self.turns)


def scale_words(width: int) -> int:
    """Returns the words of a slot for scales, a multiple of 32."""
    return -(-width // (32 * GROUP)) * 32


def slot_words(width: int) -> int:
    """Returns the words of a slot of rows."""
    return 2 * MAX_TOP_K + scale_words(width) + width // 2


def words(rows: int, size: int, width: int) -> int:
    """Returns the words of a rank's memory."""
    return rows * size * (GENERATIONS * slot_words(width) + width // 2)


def clear(memory: Tensor, turns: Tensor) -> None:
    """Prepares the memory of a rank, before any rank sends."""
    memory.fill_(EMPTY_WORD.value)
    turns.zero_()


def dispatch(
    boxes: RowBoxes, rows: Activations, choice: Choice, experts: ExpertTables
) -> Dispatched:
    """`dispatch_torch` with equally many rows on all ranks."""
    own = rows.values if isinstance(rows, Quantized) else rows
    own_scales = rows.scales.view(torch.int32) if isinstance(rows, Quantized) else own[:, :0]
    values, groups = own.view(torch.int32), own_scales.shape[1]
    count, top_k = choice.ids.shape
    total = boxes.size * count
    assert values.stride(1) == 1 and choice.weights.is_contiguous() and choice.ids.is_contiguous()
    assert experts.reaches.shape == (*experts.table.shape, boxes.size), experts.reaches.shape
    all_values, all_ids = (
        values.new_empty(total, values.shape[1]),
        choice.ids.new_empty(total, top_k),
    )
    all_scales = values.new_empty(total, groups)
    all_weights = torch.empty_like(all_ids)
    went = torch.empty(count, boxes.size, dtype=torch.bool, device=values.device)
    came = went.new_empty(total)
    block, warps = tiling(2 * values.shape[1])
    _dispatch_kernel[(count,)](
        values,
        own_scales,
        choice.ids,
        choice.weights.view(torch.int32),
        experts.table,
        experts.reaches,
        experts.counts,
        all_values,
        all_scales,
        all_ids,
        all_weights,
        went,
        came,
        boxes.addresses,
        boxes.turns,
        count,
        values.stride(0),
        *own_scales.stride(),
        RANK=boxes.rank,
        SIZE=boxes.size,
        ROWS=len(boxes.turns),
        SLOT=slot_words(boxes.width),
        WEIGHTS=MAX_TOP_K,
        OF_GROUPS=2 * MAX_TOP_K,
        OF_VALUES=2 * MAX_TOP_K + scale_words(boxes.width),
        TOP_K=top_k,
        COLUMNS=experts.table.shape[1],
        WORDS=values.shape[1],
        GROUPS=groups,
        BLOCK=block // 2,
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_SIZE=triton.next_power_of_2(boxes.size),
        BLOCK_GROUPS=triton.next_power_of_2(max(groups, 1)),
        num_warps=warps,
        **launch_options(),
    )
    received: Activations = all_values.view(own.dtype)
    if isinstance(rows, Quantized):
        scales = all_scales.view(torch.float32)
        received = Quantized(all_values.view(own.dtype), scales, rows.group, rows.dtype)
    return Dispatched(received, all_weights.view(torch.float32), all_ids, went, came)


def combine(boxes: RowBoxes, results: Tensor, sent: Dispatched) -> Tensor:
    """`combine_torch` after `dispatch`."""
    count, width = len(sent.went), results.shape[1]
    assert results.stride(1) == 1 and boxes.serve(width, results.dtype, 1, count), results.shape
    out = results.new_empty(count, width)
    block, warps = tiling(width)
    _combine_kernel[(count,)](
        results,
        out,
        sent.went,
        sent.came,
        boxes.addresses,
        count,
        results.stride(0),
        RANK=boxes.rank,
        SIZE=boxes.size,
        FIRST=4 * GENERATIONS * len(boxes.turns) * boxes.size * slot_words(boxes.width),
        SLOT=boxes.width,
        N=width,
        BLOCK=block,
        BLOCK_SIZE=triton.next_power_of_2(boxes.size),
        num_warps=warps,
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize=["rows", "scale_row_stride", "scale_stride"])
def _dispatch_kernel(
    values,
    scales,
    ids,
    weights,
    table,
    reaches,
    counts,
    all_values,
    all_scales,
    all_ids,
    all_weights,
    went,
    came,
    addresses,
    turns,
    rows,
    stride,
    scale_row_stride,
    scale_stride,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SLOT: tl.constexpr,
    WEIGHTS: tl.constexpr,
    OF_GROUPS: tl.constexpr,
    OF_VALUES: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    chosen = k < TOP_K
    word = tl.arange(0, BLOCK)
    inside = word < WORDS
    group = tl.arange(0, BLOCK_GROUPS)
    scaled = group < GROUPS
    generation = tl.load(turns + row)
    own_ids = tl.load(ids + row * TOP_K + k, chosen, other=-1)
    own_weights = full(tl.load(weights + row * TOP_K + k, chosen, other=0))
    own = full(tl.load(values + row * stride + word, inside, other=0))
    own_scales = group
    if GROUPS:
        at = scales + row * scale_row_stride + group * scale_stride
        own_scales = full(tl.load(at, scaled, other=0))
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = row_slot(addresses, peer, generation, row, RANK, ROWS, SIZE, SLOT)
            tl.store(theirs + k, own_ids, chosen, cache_modifier=".wt")
            tl.store(theirs + WEIGHTS + k, own_weights, chosen, cache_modifier=".wt")
    rank = tl.arange(0, BLOCK_SIZE)
    place = own_ids * COLUMNS + (RANK * rows + row) % COLUMNS
    is_pair = (rank < SIZE)[:, None] & (own_ids >= 0)[None, :]
    reached = tl.load(reaches + place[None, :] * SIZE + rank[:, None], is_pair, other=0)
    goes_to = tl.max(reached.to(tl.int32), 1)
    tl.store(went + row * SIZE + rank, goes_to > 0, rank < SIZE)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            goes = of_rank(goes_to, rank, peer)
            theirs = row_slot(addresses, peer, generation, row, RANK, ROWS, SIZE, SLOT)
            tl.store(theirs + OF_VALUES + word, own, inside & goes, cache_modifier=".wt")
            if GROUPS:
                tl.store(
                    theirs + OF_GROUPS + group, own_scales, scaled & goes, cache_modifier=".wt"
                )

    # The choices of all ranks at once, because each wait takes the latency of memory
    mine = row_slot(addresses, RANK, generation, row, 0, ROWS, SIZE, SLOT)
    here = mine + rank[:, None] * SLOT + k[None, :]
    exists = (rank < SIZE)[:, None] & chosen[None, :]
    awaited = exists & (rank != RANK)[:, None]
    their_ids = tl.load(here, awaited, other=-1, volatile=True)
    their_weights = tl.load(here + WEIGHTS, awaited, other=0, volatile=True)
    while has_empty(their_ids) | has_empty(their_weights):
        their_ids = tl.load(here, awaited, other=-1, volatile=True)
        their_weights = tl.load(here + WEIGHTS, awaited, other=0, volatile=True)
    tl.debug_barrier()  # before any warp empties what another one may be waiting for
    tl.store(here, EMPTY_WORD, awaited)
    tl.store(here + WEIGHTS, EMPTY_WORD, awaited)
    their_ids = tl.where((rank == RANK)[:, None], own_ids[None, :], their_ids)
    their_weights = tl.where((rank == RANK)[:, None], own_weights[None, :], their_weights)
    at = (rank * rows + row)[:, None]
    routed = exists & (their_ids >= 0)
    if counts is not None:
        tl.atomic_add(counts + their_ids, 1, routed, sem="relaxed")
    local = tl.load(table + their_ids * COLUMNS + at % COLUMNS, routed, other=-1)
    tl.store(all_ids + at * TOP_K + k[None, :], local, exists)
    tl.store(all_weights + at * TOP_K + k[None, :], tl.where(local < 0, 0, their_weights), exists)
    comes_from = tl.max((local >= 0).to(tl.int32), 1)
    tl.store(came + rank * rows + row, comes_from > 0, rank < SIZE)

    for other in range(SIZE):  # one at a time: the rows of many ranks do not fit into registers
        to = other * rows + row
        comes = of_rank(comes_from, rank, other)
        read = own
        read_scales = own_scales
        if other != RANK:
            box = mine + other * SLOT
            expected = inside & comes
            read = tl.load(box + OF_VALUES + word, expected, other=0, volatile=True)
            while has_empty(read):
                read = tl.load(box + OF_VALUES + word, expected, other=0, volatile=True)
            if GROUPS:
                coming = scaled & comes
                read_scales = tl.load(box + OF_GROUPS + group, coming, other=0, volatile=True)
                while has_empty(read_scales):
                    read_scales = tl.load(box + OF_GROUPS + group, coming, other=0, volatile=True)
            tl.debug_barrier()
            tl.store(box + OF_VALUES + word, EMPTY_WORD, expected)
            if GROUPS:
                tl.store(box + OF_GROUPS + group, EMPTY_WORD, scaled & comes)
        tl.store(all_values + to * WORDS + word, read, inside & comes)
        if GROUPS:
            tl.store(all_scales + to * GROUPS + group, read_scales, scaled & comes)
    tl.store(turns + row, 1 - generation)


@triton.jit(do_not_specialize=["rows"])
def _combine_kernel(
    results,
    out,
    went,
    came,
    addresses,
    rows,
    stride,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    SLOT: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    rank = tl.arange(0, BLOCK_SIZE)
    came_from = tl.load(came + rank * rows + row, rank < SIZE, other=0).to(tl.int32)
    went_to = tl.load(went + row * SIZE + rank, rank < SIZE, other=0).to(tl.int32)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            at = peer * rows + row
            goes = inside & of_rank(came_from, rank, peer)
            part = filled(tl.load(results + at * stride + column, goes, other=0.0))
            theirs = result_slot(results.dtype, addresses, peer, row, RANK, FIRST, SIZE, SLOT)
            tl.store(theirs + column, part, goes, cache_modifier=".wt")
    nothing = tl.full((BLOCK,), EMPTY, tl.int16).to(results.dtype.element_ty, bitcast=True)
    acc = tl.zeros((BLOCK,), tl.float32)
    for sender in range(SIZE):
        if sender == RANK:
            at = sender * rows + row
            acc += tl.load(results + at * stride + column, inside, other=0.0).to(tl.float32)
        else:
            comes = inside & of_rank(went_to, rank, sender)
            mine = result_slot(results.dtype, addresses, RANK, row, sender, FIRST, SIZE, SLOT)
            part = tl.load(mine + column, comes, other=0.0, volatile=True)
            while tl.max(is_empty(part).to(tl.int32), 0) > 0:
                part = tl.load(mine + column, comes, other=0.0, volatile=True)
            tl.debug_barrier()
            tl.store(mine + column, nothing, comes)
            acc += part.to(tl.float32)
    tl.store(out + row * N + column, acc.to(out.dtype.element_ty), inside)


@triton.jit
def row_slot(
    addresses,
    rank,
    generation,
    row,
    sender,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    SLOT: tl.constexpr,
):
    """Returns the slot of `sender` for a row in the memory of `rank`."""
    start = tl.load(addresses + rank).to(tl.pointer_type(tl.int32))
    return tl.multiple_of(start, 16) + ((generation * ROWS + row) * SIZE + sender) * SLOT


@triton.jit
def result_slot(
    dtype,
    addresses,
    rank,
    row,
    sender,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    SLOT: tl.constexpr,
):
    """Returns the slot of `sender` for the result of a row in the memory of `rank`, whose results begin at byte FIRST."""
    start = (tl.load(addresses + rank) + FIRST).to(dtype)
    return tl.multiple_of(start, 16) + (row * SIZE + sender) * SLOT


@triton.jit
def of_rank(flags, rank, wanted):
    """Returns whether the flag of the rank `wanted` is set, of `flags` [B] of the ranks `rank` [B]."""
    return tl.sum(tl.where(rank == wanted, flags, 0), 0) > 0


@triton.jit
def has_empty(read):
    return tl.max(tl.ravel(read == EMPTY_WORD).to(tl.int32), 0) > 0


@triton.jit
def full(read):
    """Returns words with 0 in place of EMPTY_WORD."""
    return tl.where(read == EMPTY_WORD, 0, read)
