"""The Triton kernel of `gqa_decode`: a program attends to the cached rows of one part for the query heads of one KV
head.

An FP8 cache (FP8 > 0, see `exponent_bits`) is read in words of PAIR = 2 numbers. So keys and values have two tiles, the
even and the odd columns (`fp8_numbers.py`), and their products are float16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_router.worker.kernels.attention.decode_parts import (
    SETTLED_ARGUMENTS,
    online_softmax,
    pages_of,
    part_of,
    piece_at,
)
from mla_router.worker.kernels.attention.fp8_numbers import load_tiles, operand
from mla_router.worker.kernels.pdl import reads_early, start_next, wait_for_previous
from mla_router.worker.kernels.softcap import softcapped


def head_blocks(head_dim: int, v_head_dim: int, *, pair: int) -> dict[str, int]:
    """Returns the constants of keys `head_dim` and values `v_head_dim` wide. Blocks are in elements of the cache, of
    `pair` numbers. Triton multiplies powers of two from 16 on: of keys the largest that fits, then the rest."""
    elements = head_dim // pair
    own = max(16, 1 << (elements.bit_length() - 1))
    return {
        "W": head_dim,
        "V": v_head_dim,
        "BLOCK_W": own,
        "BLOCK_REST": max(16, triton.next_power_of_2(elements - own)) if elements > own else 0,
        "BLOCK_V": max(16, triton.next_power_of_2(v_head_dim // pair)),
    }


@reads_early({"SETTLED": SETTLED_ARGUMENTS})
@triton.jit(do_not_specialize=["num_requests", "page_table_stride"])
def attend_kernel(
    q,
    cache,
    page_table,
    slots,
    lengths,
    block_starts,
    first_requests,
    part_size,
    out,
    partial_out,
    partial_lse,
    scale_log2,
    value_scale,
    num_requests,
    q_stride_t,
    q_stride_h,
    page_table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    W: tl.constexpr,
    V: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    QUERIES: tl.constexpr,
    PARTIAL: tl.constexpr,
    SETTLED: tl.constexpr,
):
    """BLOCK_W, BLOCK_REST and BLOCK_V are elements of the cache. CAP is the soft cap of scores to base 2. A request has
    QUERIES query rows next to each other. With PARTIAL the results of all parts are partial, also that of a single
    one."""
    start_next()
    if not SETTLED:
        wait_for_previous()
    PAIR: tl.constexpr = 2 if FP8 else 1
    SHARE: tl.constexpr = HEADS // KV_HEADS
    ROW_BLOCKS: tl.constexpr = (SHARE * QUERIES + BLOCK_ROWS - 1) // BLOCK_ROWS
    # Neighbouring programs share a part: their keys and values of a token are side by side
    part = tl.program_id(0) // (KV_HEADS * ROW_BLOCKS)
    kv_head = tl.program_id(0) // ROW_BLOCKS % KV_HEADS
    row = tl.program_id(0) % ROW_BLOCKS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = (row < SHARE * QUERIES)[:, None]
    query = (row // SHARE)[:, None]
    heads = (kv_head * SHARE + (row if QUERIES == 1 else row % SHARE))[:, None]
    own_row = heads if QUERIES == 1 else query * HEADS + heads
    columns = tl.arange(0, BLOCK_V * PAIR)[None, :]
    keys = cache + kv_head * (W // PAIR)
    values = cache + KV_HEADS * W // PAIR + kv_head * (V // PAIR)

    request, position, end = part_of(part, part_size, first_requests, block_starts, num_requests)
    while position < end:
        length, pages, first, last, is_whole = piece_at(
            position,
            end,
            request,
            block_starts,
            lengths,
            slots,
            page_table,
            page_table_stride,
            None,
            BLOCK_TOKENS,
            WINDOW,
        )
        page = pages_of(pages, first, length, PAGE_SIZE, BLOCK_TOKENS)
        if SETTLED:
            wait_for_previous()
        queries = q + request.to(tl.int64) * QUERIES * q_stride_t + heads * q_stride_h
        if QUERIES > 1:
            queries += query.to(tl.int64) * q_stride_t
        # A head_dim that is not a power of two is multiplied in two parts
        q_own = load_queries(queries, is_row, W, BLOCK_W, FP8)
        q_rest = q_own
        if BLOCK_REST:
            DONE: tl.constexpr = BLOCK_W * PAIR
            q_rest = load_queries(queries + DONE, is_row, W - DONE, BLOCK_REST, FP8)
        acc, maximum, total_weight = _attend(
            q_own,
            q_rest,
            keys,
            values,
            pages,
            page,
            first,
            last,
            length,
            scale_log2,
            KV_HEADS * (W + V) // PAIR,
            W // PAIR,
            V // PAIR,
            BLOCK_W,
            BLOCK_REST,
            BLOCK_V,
            PAGE_SIZE,
            BLOCK_ROWS,
            BLOCK_TOKENS,
            STAGES,
            FP8,
            WINDOW,
            CAP,
        )
        sums = acc[0]
        if FP8:
            sums = tl.interleave(acc[0], acc[1]) * value_scale
        result = sums / total_weight[:, None]
        in_place = is_row & (columns < V)
        if is_whole & (not PARTIAL):
            at = (request.to(tl.int64) * (HEADS * QUERIES) + own_row) * V + columns
            tl.store(out + at, result.to(out.dtype.element_ty), mask=in_place)
        else:
            places = (part + request).to(tl.int64) * (HEADS * QUERIES) + own_row
            tl.store(partial_out + places * V + columns, result, mask=in_place)
            lse = (maximum + tl.log2(total_weight))[:, None]
            tl.store(partial_lse + places, lse, mask=is_row)
        request += 1
        position = tl.load(block_starts + request)
    if SETTLED:
        wait_for_previous()  # for a part without pieces


@triton.jit
def _attend(
    q_own,
    q_rest,
    keys,
    values,
    pages,
    page,
    first,
    last,
    length,
    scale_log2,
    ROW: tl.constexpr,
    W: tl.constexpr,
    V: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """Returns the sum of weighted values in PAIR tiles [rows, BLOCK_V], the maximal score and the sum of weights of
    blocks [first, last) of one request. Rows of the cache have ROW elements, keys W and values V; `page` is the page of
    the first block. Scores are to base 2."""
    PAIR: tl.constexpr = 2 if FP8 else 1
    tokens = tl.arange(0, BLOCK_TOKENS)
    maximum = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total_weight = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.tuple(())
    for _ in tl.static_range(PAIR):
        acc += (tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32),)
    for block in tl.range(first, last, num_stages=STAGES):
        at = block * BLOCK_TOKENS + tokens
        rows = ((page.to(tl.int64) * PAGE_SIZE + at % PAGE_SIZE) * ROW)[:, None]
        # Read one block ahead, off the path of the loads that depend on it
        page = pages_of(pages, block + 1, length, PAGE_SIZE, BLOCK_TOKENS)
        # Rows beyond the end and before the window belong to another request or to none, and may be NaN
        visible = at < length
        if WINDOW is not None:
            visible = visible & (at >= length - WINDOW)
        exists = visible[:, None]
        k = load_cached(keys + rows, exists, W, BLOCK_W, FP8)
        scores = tl.dot(q_own[0], tl.trans(k[0]), input_precision="ieee")
        if FP8:
            scores = tl.dot(q_own[1], tl.trans(k[1]), scores, input_precision="ieee")
        if BLOCK_REST:
            rest = load_cached(keys + BLOCK_W + rows, exists, W - BLOCK_W, BLOCK_REST, FP8)
            for tile in tl.static_range(PAIR):
                of_tile = tl.trans(rest[tile])
                scores = tl.dot(q_rest[tile], of_tile, scores, input_precision="ieee")
        if CAP is not None:
            scores = softcapped(scores, scale_log2, CAP)
        else:
            scores *= scale_log2
        scores = tl.where(visible[None, :], scores, float("-inf"))
        weights, shrink, maximum, total_weight = online_softmax(scores, maximum, total_weight)
        v = load_cached(values + rows, exists, V, BLOCK_V, FP8)
        weights = weights.to(v[0].dtype)
        summed = tl.tuple(())
        for tile in tl.static_range(PAIR):
            shrunk = acc[tile] * shrink[:, None]
            summed += (tl.dot(weights, v[tile], shrunk, input_precision="ieee"),)
        acc = summed
    return acc, maximum, total_weight


@triton.jit
def load_queries(rows, exist, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr):
    """Returns the first BLOCK * PAIR columns of query rows [N, 1] in PAIR tiles: 0 from WIDTH on and where no row
    exists."""
    PAIR: tl.constexpr = 2 if FP8 else 1
    tiles = tl.tuple(())
    for tile in tl.static_range(PAIR):
        columns = tile + PAIR * tl.arange(0, BLOCK)[None, :]
        mask = exist & (columns < WIDTH) if WIDTH < BLOCK * PAIR else exist
        tiles += (operand(tl.load(rows + columns, mask=mask, other=0.0), FP8),)
    return tiles


@triton.jit
def load_cached(rows, exist, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr):
    """Returns the first BLOCK elements of cached rows [N, 1] as tiles of numbers: 0 from WIDTH on and where no row
    exists."""
    columns = tl.arange(0, BLOCK)[None, :]
    mask = exist & (columns < WIDTH) if WIDTH < BLOCK else exist
    return load_tiles(rows + columns, mask, FP8)
