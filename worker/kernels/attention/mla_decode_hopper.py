"""The kernel of `mla_decode` for Hopper's tensor cores (sm_90), in Gluon, for at most 16 query rows.

Its products are transposed. A warpgroup multiplies at least 64 rows, too many for 16 queries. So cached rows are the
rows of the products and queries are the columns: scores are [tokens, queries], and transposed latents times weights are
[latents, queries]. No row of a product is padding, and both products read the cached rows from shared memory, which
saves the registers and instructions of Triton's small products. The Triton kernel (`mla_decode_kernel.py`) is otherwise
the same, and serves all other cases.

Shared memory has room for two blocks of cached rows. Queries are loaded before the first block.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_router.worker.kernels.attention.decode_parts import part_of, piece_at
from mla_router.worker.kernels.attention.decode_tiling import Tiling
from mla_router.worker.kernels.attention.mla_decode_kernel import SETTLED_ARGUMENTS
from mla_router.worker.kernels.dispatch import is_hopper
from mla_router.worker.kernels.pdl import reads_early, wait_for_previous

TOKENS = gl.constexpr(64)  # of a block: rows of the first product
ROWS = gl.constexpr(16)  # query rows: columns of both products
STAGES = gl.constexpr(2)


def suits_hopper(tiling: Tiling, q_latent: Tensor, q_pe: Tensor, queries: int) -> bool:
    """Whether `attend_hopper_kernel` serves the call: one new token of each request, a tile like its own, and rows that
    fill whole lines of the swizzled layout in shared memory."""
    return (
        is_hopper(q_latent.device)
        and queries == 1
        and tiling.block_rows == ROWS.value
        and tiling.block_tokens == TOKENS.value
        and q_latent.shape[-1] in (64, 128, 256, 512)
        and q_pe.shape[-1] == 64
    )


@reads_early({"SETTLED": SETTLED_ARGUMENTS})
@gluon.jit(do_not_specialize=["num_requests", "page_table_stride"])
def attend_hopper_kernel(
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
    LATENT: gl.constexpr,
    ROPE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SETTLED: gl.constexpr,
):
    if not SETTLED:
        wait_for_previous()
    DTYPE: gl.constexpr = cache.dtype.element_ty
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    short_lines: gl.constexpr = gl.NVMMASharedLayout(2 * ROWS, 16, rank=2)
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    of_columns: gl.constexpr = gl.SliceLayout(0, product)
    latents = gl.allocate_shared_memory(DTYPE, [STAGES, TOKENS, LATENT], lines)
    ropes = gl.allocate_shared_memory(DTYPE, [STAGES, TOKENS, ROPE], lines)
    latent_queries = gl.allocate_shared_memory(DTYPE, [ROWS, LATENT], lines)
    rope_queries = gl.allocate_shared_memory(DTYPE, [ROWS, ROPE], lines)
    weights = gl.allocate_shared_memory(DTYPE, [TOKENS, ROWS], short_lines)

    tokens = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, copied))
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, copied)), 1)
    latent = gl.expand_dims(gl.arange(0, LATENT, layout=gl.SliceLayout(0, copied)), 0)
    rope = gl.expand_dims(gl.arange(0, ROPE, layout=gl.SliceLayout(0, copied)), 0)
    at_latent = row * q_latent_stride_h + latent
    at_rope = row * q_pe_stride_h + rope
    token_of_scores = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, product))
    head = gl.arange(0, ROWS, layout=of_columns)

    part = gl.program_id(0)
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
        token = request.to(gl.int64)
        latent_query = gl.load(
            q_latent + token * q_latent_stride_t + at_latent, mask=row < HEADS, other=0.0
        )
        rope_query = gl.load(q_pe + token * q_pe_stride_t + at_rope, mask=row < HEADS, other=0.0)
        for stage in gl.static_range(STAGES):
            block = first + stage
            copy_rows(
                cache,
                page,
                latents.index(stage),
                ropes.index(stage),
                block,
                last,
                tokens,
                length,
                PAGE_SIZE,
            )
            page = pages_of_rows(pages, block + 1, tokens, length, PAGE_SIZE)
        latent_queries.store(latent_query)
        rope_queries.store(rope_query)

        # Finite, so that a row which sees nothing gets weights 0 and not NaN
        maximum = gl.full([ROWS], -1e30, gl.float32, of_columns)
        # Each thread sums its own tokens; the sums of all threads are added at the end
        weighed = gl.zeros([TOKENS, ROWS], gl.float32, product)
        acc = gl.zeros([LATENT, ROWS], gl.float32, product)
        for i in range(first, last):
            room = (i - first) % STAGES
            # This block has arrived, for all threads
            async_copy.wait_group(STAGES - 1)
            gl.thread_barrier()
            fence_async_shared()
            scores = gl.zeros([TOKENS, ROWS], gl.float32, product)
            scores = warpgroup_mma(
                latents.index(room),
                latent_queries.permute((1, 0)),
                scores,
                use_acc=False,
                is_async=True,
            )
            scores = warpgroup_mma(
                ropes.index(room), rope_queries.permute((1, 0)), scores, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
            exists = gl.expand_dims(i * TOKENS + token_of_scores < length, 1)
            scores = gl.where(exists, scores * scale_log2, float("-inf"))
            new = gl.maximum(maximum, gl.max(scores, 0))
            scores = gl.exp2(scores - gl.expand_dims(new, 0))
            shrink = gl.expand_dims(gl.exp2(maximum - new), 0)
            maximum = new
            weighed = weighed * shrink + scores
            weights.store(scores.to(DTYPE))
            fence_async_shared()
            across = latents.index(room).permute((1, 0))
            acc = warpgroup_mma(across, weights, acc * shrink, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            # All threads have read this block
            gl.thread_barrier()
            block = i + STAGES
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
        total_weight = gl.sum(weighed, 0)
        # A row that sees nothing of this part has weight 0
        acc *= gl.expand_dims(1 / gl.where(total_weight == 0.0, 1.0, total_weight), 0)
        if is_whole:
            _store(out + request.to(gl.int64) * (HEADS * LATENT), acc, HEADS)
        else:
            # Parts and requests only grow from piece to piece: their sum is the piece's index
            place = (part + request).to(gl.int64) * HEADS
            _store(partial_out + place * LATENT, acc, HEADS)
            gl.store(partial_lse + place + head, maximum + gl.log2(total_weight), mask=head < HEADS)
        request += 1
        position = gl.load(block_starts + request)
    if SETTLED:
        wait_for_previous()  # for a part without pieces


@gluon.jit
def pages_of_rows(pages, block, tokens, length, PAGE_SIZE: gl.constexpr):
    """Returns the page of each row of a block; 0 beyond the end."""
    at = block * TOKENS + tokens
    return gl.load(pages + at // PAGE_SIZE, mask=at < length, other=0)


@gluon.jit
def copy_rows(cache, page, latents, ropes, block, last, tokens, length, PAGE_SIZE: gl.constexpr):
    """Starts to copy a block's rows as one group of copies, which is empty from the block `last` on. Rows beyond the end
    belong to another request or to none, and may be NaN: zeros are copied instead."""
    if block < last:
        LATENT: gl.constexpr = latents.shape[1]
        ROPE: gl.constexpr = ropes.shape[1]
        columns: gl.constexpr = gl.SliceLayout(0, tokens.type.layout.parent)
        at = block * TOKENS + tokens
        row = page.to(gl.int64) * PAGE_SIZE + at % PAGE_SIZE
        rows = cache + gl.expand_dims(row * (LATENT + ROPE), 1)
        exists = gl.expand_dims(at < length, 1)
        latent = gl.expand_dims(gl.arange(0, LATENT, layout=columns), 0)
        async_copy.async_copy_global_to_shared(latents, rows + latent, mask=exists)
        rope = gl.expand_dims(LATENT + gl.arange(0, ROPE, layout=columns), 0)
        async_copy.async_copy_global_to_shared(ropes, rows + rope, mask=exists)
    async_copy.commit_group()


@gluon.jit
def _store(out, sums, HEADS: gl.constexpr):
    """Writes the first columns of sums [LATENT, ROWS], which are heads, as a row for each head."""
    layout: gl.constexpr = sums.type.layout
    latent = gl.expand_dims(gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, layout)), 1)
    head = gl.expand_dims(gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    at = out + head * sums.shape[0] + latent
    gl.store(at, sums.to(out.dtype.element_ty), mask=head < HEADS)
