"""The division of the KV rows of a decode step among the programs of a persistent kernel.

The rows of each request are counted in blocks. The blocks of all requests, laid end to end, are cut into `num_parts`
parts of the same size. Every program has the same work for any lengths, and none waits for the longest
request. FlashMLA's tile scheduler metadata has the same idea (github.com/deepseek-ai/FlashMLA). The schedule is
computed on the device, so that a CUDA graph can contain it.

A part with two requests loads queries twice and writes two results. If parts with one request each are hardly larger,
each request begins a part, and its last part may have fewer blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.attention.decode_parts import blocks_before
from mla_router.worker.kernels.attention.decode_tiling import Tiling
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous

REQUESTS_AT_ONCE = 128
PARTS_PER_PROGRAM = 32

# Blocks by which a part may be larger to have one request alone: on an H200 a second request costs a part about as much
# as two blocks of 32 tokens.
SECOND_REQUEST = tl.constexpr(3)


@dataclass(frozen=True, slots=True)
class DecodeSchedule:
    """Part p has the blocks [p * part_size, (p + 1) * part_size) of all requests' blocks. If each request begins
    a part, no request owns the blocks between its last block and the next request's first one."""

    block_starts: Tensor  # [R + 1] int32, the first block of each request
    # [num_parts] int32, the request of a part's first block; R if there is none
    first_requests: Tensor
    part_size: Tensor  # [1] int32, blocks
    max_length: int  # upper bound of all lengths, known on the host, for attention without blocks
    tiling: Tiling
    window: int | None = None  # of an `AttentionSpec`: the blocks before it belong to no part

    @property
    def num_parts(self) -> int:
        return self.first_requests.shape[0]


def decode_schedule(
    lengths: Tensor,
    *,
    max_length: int,
    tiling: Tiling,
    num_parts: int,
    window: int | None = None,
) -> DecodeSchedule:
    """Returns the schedule of R requests with `lengths` [R] int32, at most max_length, of which each attends to the last
    `window` rows. A request without rows may have a piece without blocks.

    Runs once a step, for all layers. Launches one kernel and does not wait for the device.
    """
    schedule = decode_schedule_triton if lengths.is_cuda else decode_schedule_torch
    return schedule(
        lengths, max_length=max_length, tiling=tiling, num_parts=num_parts, window=window
    )


def decode_schedule_torch(
    lengths: Tensor,
    *,
    max_length: int,
    tiling: Tiling,
    num_parts: int,
    window: int | None = None,
) -> DecodeSchedule:
    blocks = (lengths + tiling.block_tokens - 1) // tiling.block_tokens
    if window is not None:
        blocks -= (lengths - window).clamp(min=0) // tiling.block_tokens
    part_size = ((blocks.sum(0, keepdim=True) + num_parts - 1) // num_parts).clamp(
        min=tiling.min_blocks
    )
    sizes = part_size + torch.arange(SECOND_REQUEST.value + 1, device=lengths.device)
    good = ((blocks[:, None] + sizes - 1) // sizes).sum(0) <= num_parts
    grain = torch.where(good.any(), torch.where(good, sizes, sizes[-1]).amin(), 1)
    part_size = torch.maximum(part_size, grain).int()
    ends = ((blocks + grain - 1) // grain * grain).cumsum(0).int()
    block_starts = torch.cat((ends.new_zeros(1), ends))
    part_starts = torch.arange(num_parts, dtype=torch.int32, device=lengths.device) * part_size
    first_requests = torch.searchsorted(ends, part_starts, right=True).int()
    return DecodeSchedule(block_starts, first_requests, part_size, max_length, tiling, window)


def decode_schedule_triton(
    lengths: Tensor,
    *,
    max_length: int,
    tiling: Tiling,
    num_parts: int,
    window: int | None = None,
) -> DecodeSchedule:
    assert lengths.ndim == 1 and lengths.dtype == torch.int32 and num_parts > 0, (
        f"lengths {tuple(lengths.shape)} {lengths.dtype}, num_parts {num_parts}"
    )
    block_starts = lengths.new_empty(len(lengths) + 1)
    first_requests = lengths.new_empty(num_parts)
    part_size = lengths.new_empty(1)
    schedule_kernel[(triton.cdiv(num_parts, PARTS_PER_PROGRAM),)](
        lengths,
        block_starts,
        first_requests,
        part_size,
        len(lengths),
        num_parts,
        BLOCK_TOKENS=tiling.block_tokens,
        MIN_BLOCKS=tiling.min_blocks,
        REQUESTS=REQUESTS_AT_ONCE,
        PARTS=PARTS_PER_PROGRAM,
        WINDOW=window,
        num_warps=4,
        **launch_options(),
    )
    return DecodeSchedule(block_starts, first_requests, part_size, max_length, tiling, window)


@triton.jit(do_not_specialize=["num_requests", "num_parts"])
def schedule_kernel(
    lengths,
    block_starts,
    first_requests,
    part_size,
    num_requests,
    num_parts,
    BLOCK_TOKENS: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    REQUESTS: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Each program finds the first requests of PARTS parts. The first program also writes everything else."""
    wait_for_previous()
    program = tl.program_id(0)
    total = 0
    for start in range(0, num_requests, REQUESTS):
        total += tl.sum(_blocks(lengths, start, num_requests, BLOCK_TOKENS, REQUESTS, WINDOW), 0)
    size = tl.maximum((total + num_parts - 1) // num_parts, MIN_BLOCKS)
    # The number of parts if each has one request, for this size and the next ones
    sizes = size + tl.arange(0, triton.next_power_of_2(SECOND_REQUEST + 1))
    needed = tl.zeros_like(sizes)
    for start in range(0, num_requests, REQUESTS):
        blocks = _blocks(lengths, start, num_requests, BLOCK_TOKENS, REQUESTS, WINDOW)
        needed += tl.sum(tl.cdiv(blocks[:, None], sizes[None, :]), 0)
    good = (needed <= num_parts) & (sizes <= size + SECOND_REQUEST)
    least = tl.min(tl.where(good, sizes, 2**30), 0)
    grain = tl.where(least < 2**30, least, 1)
    size = tl.maximum(size, grain)
    if program == 0:
        tl.store(part_size, size)
        tl.store(block_starts, 0)

    part = program * PARTS + tl.arange(0, PARTS)
    part_start = part * size
    first = tl.zeros([PARTS], tl.int32)
    before = 0
    for start in range(0, num_requests, REQUESTS):
        request = start + tl.arange(0, REQUESTS)
        exists = request < num_requests
        blocks = _blocks(lengths, start, num_requests, BLOCK_TOKENS, REQUESTS, WINDOW)
        blocks = tl.cdiv(blocks, grain) * grain
        end = before + tl.cumsum(blocks, 0)
        before += tl.sum(blocks, 0)
        # A part begins in the first request that ends after the part's start
        over = (end[None, :] <= part_start[:, None]) & exists[None, :]
        first += tl.sum(over.to(tl.int32), 1)
        if program == 0:
            tl.store(block_starts + 1 + request, end, mask=exists)
    tl.store(first_requests + part, first, mask=part < num_parts)


@triton.jit
def _blocks(
    lengths,
    start,
    num_requests,
    BLOCK_TOKENS: tl.constexpr,
    REQUESTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Returns the blocks of REQUESTS requests from `start` on; 0 after the last request."""
    request = start + tl.arange(0, REQUESTS)
    length = tl.load(lengths + request, mask=request < num_requests, other=0)
    blocks = tl.cdiv(length, BLOCK_TOKENS)
    if WINDOW is not None:
        blocks -= blocks_before(length, BLOCK_TOKENS, WINDOW)
    return blocks
