"""The Triton kernel of `mla_decode`: a program attends to the cached rows of one part.

An FP8 cache (FP8 > 0, see `exponent_bits`) is read in words of PAIR = 2 numbers. So a piece of latents has two tiles,
the even and the odd columns (`fp8_numbers.py`), and their products are float16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_router.worker.kernels.attention import decode_parts
from mla_router.worker.kernels.attention.decode_parts import (
    online_softmax,
    pages_of,
    part_of,
    piece_at,
)
from mla_router.worker.kernels.attention.fp8_numbers import load_tiles, operand
from mla_router.worker.kernels.pdl import reads_early, start_next, wait_for_previous

# Early reads (`pdl.py`) of this kernel and of Hopper's (`mla_decode_hopper.py`)
SETTLED_ARGUMENTS = (*decode_parts.SETTLED_ARGUMENTS, "skipped")


@reads_early({"SETTLED": SETTLED_ARGUMENTS})
@triton.jit(do_not_specialize=["num_requests", "page_table_stride"])
def attend_kernel(
    q_latent,
    q_pe,
    cache,
    page_table,
    slots,
    lengths,
    skipped,
    block_starts,
    first_requests,
    part_size,
    out,
    partial_out,
    partial_lse,
    scale_log2,
    num_requests,
    q_latent_stride_t,
    q_latent_stride_h,
    q_pe_stride_t,
    q_pe_stride_h,
    page_table_stride,
    value_scale,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    PIECES: tl.constexpr,
    PREFIX: tl.constexpr,
    SETTLED: tl.constexpr,
    FP8: tl.constexpr,
):
    """With PREFIX a request is a group of QUERIES queries that see the same rows: requests with a common prefix
    (`shared_prefixes.py`), or the nodes of a tree (`mla_tree_decode.py`). The kernel reads these rows alone, so all
    results are partial."""
    start_next()
    if not SETTLED:
        wait_for_previous()
    ROWS: tl.constexpr = HEADS * QUERIES
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    # Neighbouring programs share a part, and its KV rows in L2
    part = tl.program_id(0) // ROW_BLOCKS
    rows = tl.program_id(0) % ROW_BLOCKS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    # A constant if no tile has padding: that saves registers
    row_mask = rows < ROWS if ROWS % BLOCK_ROWS else tl.full([BLOCK_ROWS], True, tl.int1)
    query = rows // HEADS if QUERIES > 1 else 0
    head = rows % HEADS if QUERIES > 1 else rows
    q_latent_at = query * q_latent_stride_t + head * q_latent_stride_h
    q_pe_at = query * q_pe_stride_t + head * q_pe_stride_h
    PAIR: tl.constexpr = 2 if FP8 else 1
    WIDTH: tl.constexpr = LATENT // PIECES
    latent = PAIR * tl.arange(0, WIDTH // PAIR)
    rope = PAIR * tl.arange(0, ROPE // PAIR)

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
            skipped,
            BLOCK_TOKENS,
        )
        # Before the queries: all later loads depend on the page
        page = pages_of(pages, first, length, PAGE_SIZE, BLOCK_TOKENS)
        if SETTLED:
            wait_for_previous()
        token = (request * QUERIES).to(tl.int64)
        q_c = tl.tuple(())
        for tile in tl.static_range(PIECES * PAIR):
            columns = tile // PAIR * WIDTH + tile % PAIR + latent
            at = token * q_latent_stride_t + q_latent_at[:, None] + columns[None, :]
            q = tl.load(q_latent + at, mask=row_mask[:, None], other=0.0)
            q_c += (operand(q, FP8),)
        q_r = tl.tuple(())
        for tile in tl.static_range(PAIR):
            at = token * q_pe_stride_t + q_pe_at[:, None] + (tile + rope)[None, :]
            q = tl.load(q_pe + at, mask=row_mask[:, None], other=0.0)
            q_r += (operand(q, FP8),)
        # Each new token attends to itself and the tokens before
        visible = length - QUERIES + 1 + query
        if PREFIX:
            visible = tl.zeros_like(query) + length

        acc, maximum, total_weight = _attend(
            q_c,
            q_r,
            cache,
            pages,
            page,
            first,
            last,
            length,
            visible,
            scale_log2,
            QUERIES,
            LATENT,
            ROPE,
            PAGE_SIZE,
            BLOCK_ROWS,
            BLOCK_TOKENS,
            STAGES,
            PIECES,
            FP8,
        )
        # A row that sees nothing of this part has weight 0
        safe = tl.where(total_weight == 0.0, 1.0, total_weight)
        if FP8:
            safe = safe / value_scale
            whole = tl.tuple(())
            for piece in tl.static_range(PIECES):
                whole += (tl.interleave(acc[2 * piece], acc[2 * piece + 1]),)
            acc = whole
        if is_whole & (not PREFIX):
            place = request.to(tl.int64) * ROWS
            _store(out + place * LATENT, rows, acc, safe, row_mask, LATENT, PIECES)
        else:
            # Parts and requests only grow from piece to piece: their sum is the piece's index
            place = (part + request).to(tl.int64) * ROWS
            _store(partial_out + place * LATENT, rows, acc, safe, row_mask, LATENT, PIECES)
            tl.store(partial_lse + place + rows, maximum + tl.log2(total_weight), mask=row_mask)
        request += 1
        position = tl.load(block_starts + request)
    if SETTLED:
        wait_for_previous()  # for a part without pieces


@triton.jit
def _attend(
    q_c,
    q_r,
    cache,
    pages,
    page,
    first,
    last,
    length,
    visible,
    scale_log2,
    QUERIES: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    PIECES: tl.constexpr,
    FP8: tl.constexpr,
):
    """Returns the sum of weighted latents, in tiles [rows, LATENT / PIECES / PAIR], the maximal score and the sum of
    weights of blocks [first, last) of one request; `page` is the page of the first block. Scores are to base 2.

    Each piece has its own sum of scores: products of a warp that add to the same sum wait for each other, some 30
    cycles each.
    """
    PAIR: tl.constexpr = 2 if FP8 else 1
    WIDTH: tl.constexpr = LATENT // PIECES // PAIR  # of a tile
    TILES: tl.constexpr = PIECES * PAIR
    ROW: tl.constexpr = (LATENT + ROPE) // PAIR  # elements of the cache
    latent = tl.arange(0, WIDTH)
    rope = tl.arange(0, ROPE // PAIR)
    tokens = tl.arange(0, BLOCK_TOKENS)
    # Finite, so that a row which sees nothing gets weights 0 and not NaN
    maximum = tl.full([BLOCK_ROWS], -1e30, tl.float32)
    total_weight = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.tuple(())
    for _ in tl.static_range(TILES):
        acc += (tl.zeros([BLOCK_ROWS, WIDTH], tl.float32),)

    for block in tl.range(first, last, num_stages=STAGES):
        at = block * BLOCK_TOKENS + tokens
        row = page.to(tl.int64) * PAGE_SIZE + at % PAGE_SIZE
        base = cache + row[:, None] * ROW
        # Read one block ahead, off the path of the loads that depend on it
        page = pages_of(pages, block + 1, length, PAGE_SIZE, BLOCK_TOKENS)
        # Rows beyond the end belong to another request or to none, and may be NaN
        exists = (at < length)[:, None]
        k_c = tl.tuple(())
        for piece in tl.static_range(PIECES):
            k_c += load_tiles(base + piece * WIDTH + latent[None, :], exists, FP8)
        k_r = load_tiles(base + LATENT // PAIR + rope[None, :], exists, FP8)
        scores = tl.dot(q_c[0], tl.trans(k_c[0]), input_precision="ieee")
        for tile in tl.static_range(PAIR):
            scores = tl.dot(q_r[tile], tl.trans(k_r[tile]), scores, input_precision="ieee")
        scores *= scale_log2
        for tile in tl.static_range(1, TILES):
            # Scaled before it is added: a plain sum would become a product with an accumulator
            scores += tl.dot(q_c[tile], tl.trans(k_c[tile]), input_precision="ieee") * scale_log2
        seen = at[None, :] < (visible if QUERIES == 1 else visible[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, maximum, total_weight = online_softmax(scores, maximum, total_weight)
        weights = weights.to(k_c[0].dtype)
        summed = tl.tuple(())
        for tile in tl.static_range(TILES):
            shrunk = acc[tile] * shrink[:, None]
            summed += (tl.dot(weights, k_c[tile], shrunk, input_precision="ieee"),)
        acc = summed
    return acc, maximum, total_weight


@triton.jit
def _store(out, rows, acc, total_weight, row_mask, LATENT: tl.constexpr, PIECES: tl.constexpr):
    """Writes rows of LATENT numbers each."""
    WIDTH: tl.constexpr = LATENT // PIECES
    for piece in tl.static_range(PIECES):
        latent = piece * WIDTH + tl.arange(0, WIDTH)
        values = (acc[piece] / total_weight[:, None]).to(out.dtype.element_ty)
        tl.store(out + rows[:, None] * LATENT + latent[None, :], values, mask=row_mask[:, None])
