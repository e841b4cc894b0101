"""The kernel of `mla_decode` for Hopper's tensor cores (sm_90), in Gluon, for more than 32 query rows over a cache of 16
bits. Query rows are heads times new tokens of a request.

A program has 64 query rows, as many as a warpgroup multiplies at least. The sums [64, LATENT] of 512 columns fill half of
the registers of a multiprocessor, so there is one program of two warpgroups. Each has half of the tokens of the scores, and
half of the columns of the sums; weights go through shared memory. FlashMLA divides the sums in the same way
(github.com/deepseek-ai/FlashMLA, docs/20250422-new-kernel-deep-dive.md). The transposed products of `mla_decode_hopper.py`
are slower here (docs/design/kernels.md).

Shared memory has room for the queries and two blocks of cached rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_router.worker.kernels.attention.decode_parts import part_of, piece_at
from mla_router.worker.kernels.attention.mla_decode_hopper import copy_rows, pages_of_rows
from mla_router.worker.kernels.attention.mla_decode_kernel import SETTLED_ARGUMENTS
from mla_router.worker.kernels.pdl import reads_early, wait_for_previous

TOKENS = gl.constexpr(64)  # of a block: columns of the first product
ROWS = gl.constexpr(64)  # query rows of both products
ROOMS = gl.constexpr(2)  # for blocks of cached rows


@reads_early({"SETTLED": SETTLED_ARGUMENTS})
@gluon.jit(do_not_specialize=["num_requests", "page_table_stride"])
def attend_wide_kernel(
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
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    LATENT: gl.constexpr,
    ROPE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PREFIX: gl.constexpr,
    SETTLED: gl.constexpr,
):
    if not SETTLED:
        wait_for_previous()
    ALL_ROWS: gl.constexpr = HEADS * QUERIES
    ROW_BLOCKS: gl.constexpr = (ALL_ROWS + ROWS - 1) // ROWS
    DTYPE: gl.constexpr = cache.dtype.element_ty
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TOKENS // 2, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    latents = gl.allocate_shared_memory(DTYPE, [ROOMS, TOKENS, LATENT], lines)
    ropes = gl.allocate_shared_memory(DTYPE, [ROOMS, TOKENS, ROPE], lines)
    latent_queries = gl.allocate_shared_memory(DTYPE, [ROWS, LATENT], lines)
    rope_queries = gl.allocate_shared_memory(DTYPE, [ROWS, ROPE], lines)
    weights = gl.allocate_shared_memory(DTYPE, [ROWS, TOKENS], lines)

    # Neighbouring programs share a part, and its KV rows in L2
    part = gl.program_id(0) // ROW_BLOCKS
    first_row = gl.program_id(0) % ROW_BLOCKS * ROWS
    tokens = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, copied))
    loaded = gl.expand_dims(first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copied)), 1)
    latent = gl.expand_dims(gl.arange(0, LATENT, layout=gl.SliceLayout(0, copied)), 0)
    rope = gl.expand_dims(gl.arange(0, ROPE, layout=gl.SliceLayout(0, copied)), 0)
    query, head = loaded // HEADS, loaded % HEADS
    at_latent = query * q_latent_stride_t + head * q_latent_stride_h + latent
    at_rope = query * q_pe_stride_t + head * q_pe_stride_h + rope
    row = first_row + gl.arange(0, ROWS, layout=of_rows)
    token = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, of_scores)), 0)

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
            TOKENS,
        )
        page = pages_of_rows(pages, first, tokens, length, PAGE_SIZE)
        if SETTLED:
            wait_for_previous()
        for ahead in gl.static_range(ROOMS):
            block = first + ahead
            copy_rows(
                cache,
                page,
                latents.index(ahead),
                ropes.index(ahead),
                block,
                last,
                tokens,
                length,
                PAGE_SIZE,
            )
            page = pages_of_rows(pages, block + 1, tokens, length, PAGE_SIZE)
        new_token = (request * QUERIES).to(gl.int64)
        exists = loaded < ALL_ROWS
        latent_queries.store(
            gl.load(q_latent + new_token * q_latent_stride_t + at_latent, mask=exists, other=0.0)
        )
        rope_queries.store(
            gl.load(q_pe + new_token * q_pe_stride_t + at_rope, mask=exists, other=0.0)
        )
        # Each new token attends to itself and the tokens before
        visible = length
        if not PREFIX:
            visible = gl.expand_dims(length - QUERIES + 1 + row // HEADS, 1)

        # Finite, so that a row which sees nothing gets weights 0 and not NaN
        maximum = gl.full([ROWS], -1e30, gl.float32, of_rows)
        # Each thread sums its own tokens; the sums of all threads are added at the end
        weighed = gl.zeros([ROWS, TOKENS], gl.float32, of_scores)
        acc = gl.zeros([ROWS, LATENT], gl.float32, of_sums)
        for i in range(first, last):
            room = (i - first) % ROOMS
            # This block has arrived, for all threads
            async_copy.wait_group(ROOMS - 1)
            fence_async_shared()
            gl.thread_barrier()
            scores = gl.zeros([ROWS, TOKENS], gl.float32, of_scores)
            scores = warpgroup_mma(
                latent_queries,
                latents.index(room).permute((1, 0)),
                scores,
                use_acc=False,
                is_async=True,
            )
            scores = warpgroup_mma(
                rope_queries, ropes.index(room).permute((1, 0)), scores, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
            seen = i * TOKENS + token < visible
            scores = gl.where(seen, scores * scale_log2, float("-inf"))
            new = gl.maximum(maximum, gl.max(scores, 1))
            scores = gl.exp2(scores - gl.expand_dims(new, 1))
            shrink = gl.exp2(maximum - new)
            maximum = new
            weighed = weighed * gl.expand_dims(shrink, 1) + scores
            weights.store(scores.to(DTYPE))
            acc *= gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, of_sums)), 1)
            fence_async_shared()
            gl.thread_barrier()
            acc = warpgroup_mma(weights, latents.index(room), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            # All threads have read this block
            gl.thread_barrier()
            block = i + ROOMS
            copy_rows(
                cache,
                page,
                latents.index(room),
                ropes.index(room),
                block,
                last,
                tokens,
                length,
                PAGE_SIZE,
            )
            page = pages_of_rows(pages, block + 1, tokens, length, PAGE_SIZE)
        total_weight = gl.sum(weighed, 1)
        # A row that sees nothing of this part has weight 0
        inverse = 1 / gl.where(total_weight == 0.0, 1.0, total_weight)
        acc *= gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, of_sums)), 1)
        if is_whole and not PREFIX:
            place = request.to(gl.int64) * ALL_ROWS
            _store(out + place * LATENT, acc, first_row, ALL_ROWS)
        else:
            # Parts and requests only grow from piece to piece: their sum is the piece's index
            place = (part + request).to(gl.int64) * ALL_ROWS
            _store(partial_out + place * LATENT, acc, first_row, ALL_ROWS)
            lse = maximum + gl.log2(total_weight)
            gl.store(partial_lse + place + row, lse, mask=row < ALL_ROWS)
        request += 1
        position = gl.load(block_starts + request)
    if SETTLED:
        wait_for_previous()  # for a part without pieces


@gluon.jit
def _store(out, sums, first_row, ALL_ROWS: gl.constexpr):
    """Writes sums [ROWS, LATENT] as the rows of a request from `first_row` on."""
    layout: gl.constexpr = sums.type.layout
    row = first_row + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, layout))
    row = gl.expand_dims(row, 1)
    latent = gl.expand_dims(gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    at = out + row * sums.shape[1] + latent
    gl.store(at, sums.to(out.dtype.element_ty), mask=row < ALL_ROWS)
