"""Sorts token-expert pairs by expert, so that each block of rows of a matrix product has one expert.

The rows of each expert are padded to whole blocks, as in vLLM's and SGLang's fused_moe (the idea is
MegaBlocks', Gale et al., 2022, arXiv:2211.15841). All shapes follow from the number of pairs: nothing
waits for the device. Pairs with the id -1 belong to no expert and have no row. The sort is a stable counting sort; one
program places the pairs of one expert in one chunk of the list. If one block has room for all tokens, they are not
sorted: a program of the product finds the tokens of its block among all, which saves a launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.pdl import launch_options, wait_for_previous

MAX_CHUNK = 4096


@dataclass(frozen=True)
class Blocks:
    """Rows for grouped matrix products, in at most max_blocks blocks of `rows` rows with one expert each, made from
    ids [T, K] int32.

    Sorted: pairs [max_blocks * rows] int32, the pair t * K + k of each row, or the number of pairs in padding;
    experts [max_blocks] int32; count [1] int32, the number of blocks. Entries after the last block are not
    written. Unsorted: these three are None, and `block_rows` has the rule.
    """

    ids: Tensor
    rows: int
    max_blocks: int
    pairs: Tensor | None = None
    experts: Tensor | None = None
    count: Tensor | None = None

    @property
    def intermediate_rows(self) -> int:
        """Rows of the intermediate result: in the order of the blocks, or of the pairs if unsorted."""
        return self.ids.numel() if self.pairs is None else len(self.pairs)


def max_blocks(pairs: int, num_experts: int, rows: int) -> int:
    """Returns the largest number of blocks for any distribution of the pairs."""
    experts = min(pairs, num_experts)
    return min(pairs, (pairs + experts * (rows - 1)) // rows)


@triton.jit
def block_rows(
    block,
    ids,
    pairs,
    experts,
    count,
    max_blocks,
    num_pairs,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Returns the expert of a block, the pair of each row (num_pairs in padding), the intermediate row of each row, and
    whether the block exists."""
    row = tl.arange(0, ROWS)
    if pairs is None:
        # Row r is token r. With fewer pairs than experts block p has the expert of pair p, unless an
        # earlier pair has the same expert; otherwise block e has expert e.
        by_pair = max_blocks == num_pairs
        k = tl.arange(0, BLOCK_TOP_K)
        own = row[:, None] * TOP_K + k[None, :]
        chosen = tl.load(ids + own, (k < TOP_K)[None, :] & (own < num_pairs), other=-1)
        expert = tl.where(by_pair, tl.load(ids + block), block)
        pair = tl.min(tl.where(chosen == expert, own, num_pairs), axis=1)
        first = tl.min(pair, axis=0)
        exists = tl.where(by_pair, first == block, first < num_pairs) & (expert >= 0)
        intermediate = tl.where(pair < num_pairs, pair, 0).to(tl.int64)
    else:
        # All three loads at once: entries after the last block are undefined, but readable
        intermediate = block.to(tl.int64) * ROWS + row
        expert = tl.load(experts + block)
        pair = tl.load(pairs + intermediate)
        exists = block < tl.load(count)
    return expert.to(tl.int64), pair, intermediate, exists


@triton.jit(do_not_specialize=["num_pairs"])
def _count(
    ids,
    counts,
    num_pairs,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes counts[c, e], the number of pairs of expert e in chunk c."""
    wait_for_previous()
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    own = tl.load(ids + pair, pair < num_pairs, other=-1)
    count = tl.histogram(tl.maximum(own, 0), BLOCK_EXPERTS, mask=own >= 0)
    bins = tl.arange(0, BLOCK_EXPERTS)
    tl.store(counts + chunk * EXPERTS + bins, count, bins < EXPERTS)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def _place(
    ids,
    counts,
    pairs,
    experts,
    block_count,
    num_pairs,
    num_chunks,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Places the pairs of one expert in one chunk in `pairs`. With a single chunk it counts them itself."""
    wait_for_previous()
    expert = tl.program_id(0)
    chunk = tl.program_id(1)
    bins = tl.arange(0, BLOCK_EXPERTS)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(ids + pair, pair < num_pairs, other=-1)
    before = tl.zeros((), tl.int32)  # pairs of this expert in earlier chunks
    if COUNTED:
        count = tl.zeros((BLOCK_EXPERTS,), tl.int32)
        for start in range(0, num_chunks, 8):
            c = start + tl.arange(0, 8)
            part = tl.load(
                counts + c[:, None] * EXPERTS + bins[None, :],
                (c[:, None] < num_chunks) & (bins[None, :] < EXPERTS),
                other=0,
            )
            count += tl.sum(part, axis=0)
            earlier = (c[:, None] < chunk) & (bins[None, :] == expert)
            before += tl.sum(tl.sum(tl.where(earlier, part, 0), axis=1), axis=0)
    else:
        count = tl.histogram(tl.maximum(chosen, 0), BLOCK_EXPERTS, mask=chosen >= 0)

    blocks = (count + ROWS - 1) // ROWS
    first = tl.sum(tl.where(bins < expert, blocks, 0), axis=0)
    own = tl.sum(tl.where(bins == expert, count, 0), axis=0)
    mine = chosen == expert
    rank = before + tl.cumsum(mine.to(tl.int32), axis=0) - 1
    tl.store(pairs + first * ROWS + rank, pair, mine)

    if chunk == 0:
        if expert == 0:
            tl.store(block_count, tl.sum(blocks, axis=0))
        own_blocks = (own + ROWS - 1) // ROWS
        for start in range(0, own_blocks, 128):
            block = start + tl.arange(0, 128)
            tl.store(experts + first + block, expert, block < own_blocks)
        row = own + tl.arange(0, ROWS)
        tl.store(pairs + first * ROWS + row, num_pairs, row < own_blocks * ROWS)


def chunk_size(num_pairs: int) -> int:
    """Returns one of a few sizes, since the kernels are compiled for each."""
    return next((size for size in (256, 1024, 2048) if num_pairs <= size), MAX_CHUNK)


def blocks_for(ids: Tensor, num_experts: int, rows: int) -> Blocks:
    """Returns blocks of the pairs of ids [T, K] int32, T > 0, which are distinct within a token except for -1. Launches
    nothing if a block has room for all tokens."""
    if len(ids) > rows:
        return moe_align(ids, num_experts, rows)
    return Blocks(ids.contiguous(), rows, max_blocks=min(ids.numel(), num_experts))


def moe_align(ids: Tensor, num_experts: int, rows: int) -> Blocks:
    """Returns sorted blocks of `rows` rows of the pairs of ids [T, K] int32, T > 0, each -1 or an expert below
    num_experts.

    It is one launch for up to 4096 pairs, two for more. There is no torch form: the products of plain torch
    (`moe_experts_torch`) need no blocks.
    """
    assert ids.dtype == torch.int32 and ids.numel(), f"ids {tuple(ids.shape)} {ids.dtype}"
    ids = ids.contiguous()
    num_pairs = ids.numel()
    chunk = chunk_size(num_pairs)
    chunks = triton.cdiv(num_pairs, chunk)
    blocks = empty_blocks(ids, num_experts, rows)
    block_experts = triton.next_power_of_2(num_experts)
    num_warps = 4 if chunk < MAX_CHUNK else 8
    counts = None
    if chunks > 1:
        counts = ids.new_empty(chunks, num_experts)
        _count[(chunks,)](
            ids,
            counts,
            num_pairs,
            num_experts,
            block_experts,
            chunk,
            num_warps=num_warps,
            **launch_options(),
        )
    _place[(num_experts, chunks)](
        ids,
        counts,
        blocks.pairs,
        blocks.experts,
        blocks.count,
        num_pairs,
        chunks,
        num_experts,
        block_experts,
        rows,
        chunk,
        counts is not None,
        num_warps=num_warps,
        **launch_options(),
    )
    return blocks


def empty_blocks(ids: Tensor, num_experts: int, rows: int) -> Blocks:
    most = max_blocks(ids.numel(), num_experts, rows)
    return Blocks(
        ids,
        rows,
        most,
        pairs=ids.new_empty(most * rows),
        experts=ids.new_empty(most),
        count=ids.new_empty(1),
    )
