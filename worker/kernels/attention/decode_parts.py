"""The loop of a decode kernel over its part of a `DecodeSchedule`. A part has pieces, one for each request, and a piece
has blocks of cached rows.

    request, position, end = part_of(part, part_size, first_requests, block_starts, num_requests)
    while position < end:
        length, pages, first, last, is_whole = piece_at(position, end, request, ...)
        page = pages_of(pages, first, ...)
        for block in range(first, last):
            ...  # loads rows of `page`
            page = pages_of(pages, block + 1, ...)  # off the path of the loads that depend on it
            weights, shrink, maximum, total_weight = online_softmax(scores, maximum, total_weight)
            acc = acc * shrink[:, None] + weights @ values
        request += 1
        position = tl.load(block_starts + request)
"""

from __future__ import annotations

import triton
import triton.language as tl

# The settled arguments (`pdl.py`) by which a kernel finds its part, its pieces and their pages
SETTLED_ARGUMENTS = (
    "page_table",
    "slots",
    "lengths",
    "block_starts",
    "first_requests",
    "part_size",
)


@triton.jit
def part_of(part, part_size, first_requests, block_starts, num_requests):
    """Returns the request in which a part begins, the part's first block, and the block after its last one."""
    size = tl.load(part_size)
    request = tl.load(first_requests + part)
    total = tl.load(block_starts + num_requests)
    position = part * size
    return request, position, tl.minimum(position + size, total)


@triton.jit
def piece_at(
    position,
    end,
    request,
    block_starts,
    lengths,
    slots,
    page_table,
    page_table_stride,
    skipped,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr = None,
):
    """Returns the piece of `request` that begins with the block `position` of a part, which ends before `end`: length
    and pages of the request, the piece's blocks [first, last) counted from the request's first block, and whether they
    are all blocks of the request. `skipped`, if not None, is the number of pages of each request before the
    counted ones. With a WINDOW, blocks that end before it are left out."""
    request_start = tl.load(block_starts + request)
    length = tl.load(lengths + request)
    slot = tl.load(slots + request)
    pages = page_table + slot * page_table_stride
    skip = 0
    if skipped is not None:
        skip = tl.load(skipped + request)
        pages += skip
    before = 0
    if WINDOW is not None:
        before = blocks_before(length, BLOCK_TOKENS, WINDOW)
    first = position - request_start + before
    blocks = tl.cdiv(length, BLOCK_TOKENS)
    last = tl.minimum(end - request_start + before, blocks)
    is_whole = (first == before) & (last == blocks) & (skip == 0)
    return length, pages, first, last, is_whole


@triton.jit
def blocks_before(length, BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """Returns the number of blocks that end before the last WINDOW rows of a request."""
    return tl.maximum(length - WINDOW, 0) // BLOCK_TOKENS


@triton.jit
def pages_of(pages, block, length, PAGE_SIZE: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Returns the page of each row of a block, 0 beyond the end. If all rows are in one page this is a number for each
    row as well: with a single one Triton's loads of keys and values are slower."""
    at = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    return tl.load(pages + at // PAGE_SIZE, mask=at < length, other=0)


@triton.jit
def online_softmax(scores, maximum, total_weight):
    """Returns the weights of a block's scores [rows, BLOCK_TOKENS], to base 2, the factor [rows] for the sums before,
    and the new maximum and sum of weights (Milakov and Gimelshein, 2018, arXiv:1805.02867)."""
    new = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - new[:, None])
    shrink = tl.exp2(maximum - new)
    return weights, shrink, new, total_weight * shrink + tl.sum(weights, 1)
