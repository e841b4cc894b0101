"""The kernel of `mla_decode` for Hopper's tensor cores (sm_90), in Gluon. Query rows are heads times new tokens of a
request: up to 32, or up to 64 over an FP8 cache. `mla_decode_wide.py` is for more.

Its products are transposed. A warpgroup multiplies at least 64 rows, too many for 16 queries. So cached rows are the
rows of the products and queries are the columns: scores are [tokens, queries], and transposed latents times weights are
[latents, queries]. No row of a product is padding, and both products read cached rows of 16 bits from shared memory,
which saves the registers and instructions of Triton's small products. FP8 rows become operands in registers
(`fp8_operands.py`). The Triton kernel (`mla_decode_kernel.py`) is otherwise the same, and serves all other cases.

Shared memory has STAGES blocks of cached rows. Queries are loaded before the copies of the first blocks begin: no score
is possible without them. With EARLY the blocks are copied first, before the wait for the previous kernel: rows of earlier
steps are settled (`pdl.py`). The rows of the new tokens follow after the wait.
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
from mla_router.worker.kernels.attention.fp8_numbers import operand
from mla_router.worker.kernels.attention.fp8_operands import (
    PIECE,
    fp8_scores,
    fp8_sums,
    in_order,
    ordered,
)
from mla_router.worker.kernels.attention.mla_decode_kernel import SETTLED_ARGUMENTS
from mla_router.worker.kernels.pdl import reads_early, start_next, wait_for_previous


@reads_early({"SETTLED": SETTLED_ARGUMENTS, "EARLY": ("cache",)})
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
    value_scale,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    LATENT: gl.constexpr,
    ROPE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    PREFIX: gl.constexpr,
    SETTLED: gl.constexpr,
    EARLY: gl.constexpr,
    FP8: gl.constexpr,
):
    start_next()
    if not SETTLED:
        wait_for_previous()
    ALL_ROWS: gl.constexpr = HEADS * QUERIES
    ROW_BLOCKS: gl.constexpr = (ALL_ROWS + ROWS - 1) // ROWS
    WARPS: gl.constexpr = gl.num_warps()
    CACHED: gl.constexpr = cache.dtype.element_ty
    DTYPE: gl.constexpr = gl.float16 if FP8 else CACHED
    NEW: gl.constexpr = 0 if PREFIX else QUERIES  # a request's last rows, written in this step
    PIECES: gl.constexpr = LATENT // PIECE if FP8 else 1
    WIDTH: gl.constexpr = LATENT // PIECES
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    row_lines: gl.constexpr = gl.NVMMASharedLayout(
        32 if ROWS == 16 else 64 if ROWS == 32 else 128, 16, rank=2
    )
    latent_lines: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0]) if FP8 else lines
    rope_lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0]) if FP8 else lines
    copied: gl.constexpr = gl.BlockedLayout([1, 16 if FP8 else 8], [4, 8], [WARPS, 1], [1, 0])
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    # Warpgroups divide the tokens of the scores if there are enough, otherwise the queries
    SHARE: gl.constexpr = ROWS * TOKENS // (16 * WARPS)
    of_scores: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [TOKENS // 16, 16 * WARPS // TOKENS], [16, SHARE, 16]
    )
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    latents = gl.allocate_shared_memory(CACHED, [STAGES, TOKENS, LATENT], latent_lines)
    ropes = gl.allocate_shared_memory(CACHED, [STAGES, TOKENS, ROPE], rope_lines)
    latent_queries = gl.allocate_shared_memory(DTYPE, [PIECES, ROWS, WIDTH], lines)
    rope_queries = gl.allocate_shared_memory(DTYPE, [1, ROWS, ROPE], lines)
    weights = gl.allocate_shared_memory(DTYPE, [TOKENS, ROWS], row_lines)
    memory = latents, ropes, latent_queries, rope_queries, weights

    # Neighbouring programs share a part, and its KV rows in L2
    part = gl.program_id(0) // ROW_BLOCKS
    first_row = gl.program_id(0) % ROW_BLOCKS * ROWS
    tokens = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, copied))
    row = gl.expand_dims(first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, loaded)), 1)
    query, head = row // HEADS, row % HEADS
    at_latent = query * q_latent_stride_t + head * q_latent_stride_h
    latent = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, loaded)), 0)
    at_latent += latent // 16 * 32 + latent % 16 if FP8 else latent
    at_rope = query * q_pe_stride_t + head * q_pe_stride_h
    at_rope += gl.expand_dims(gl.arange(0, ROPE, layout=gl.SliceLayout(0, loaded)), 0)
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, of_scores))
    column = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, of_scores))

    request, position, end = part_of(part, part_size, first_requests, block_starts, num_requests)
    start = position
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
        source = cache, pages, tokens, length, last
        if EARLY:
            # Of a later piece all rows are settled: it begins after the wait
            settled = gl.where(position == start, length - NEW, length)
            for stage in gl.static_range(STAGES):
                page = _copy_block(memory, stage, first + stage, page, settled, source, PAGE_SIZE)
        if SETTLED:
            wait_for_previous()
        late = False
        if EARLY:
            late = settled < gl.minimum(length, gl.minimum(first + STAGES, last) * TOKENS)
            if late:
                _copy_new_rows(memory, first, settled, source, PAGE_SIZE)
        new_token = (request * QUERIES).to(gl.int64)
        exists = row < ALL_ROWS
        at = q_latent + new_token * q_latent_stride_t
        latent_query = _read_queries(at, at_latent, exists, PIECES)
        rope_query = _read_queries(q_pe + new_token * q_pe_stride_t, at_rope, exists, 1)
        if not EARLY:
            for stage in gl.static_range(STAGES):
                page = _copy_block(memory, stage, first + stage, page, length, source, PAGE_SIZE)
        _store_queries(latent_queries, latent_query, FP8)
        _store_queries(rope_queries, rope_query, FP8)
        if late:
            async_copy.wait_group(0)
        # Each new token attends to itself and the tokens before
        visible = length
        if QUERIES > 1 and not PREFIX:
            visible = gl.expand_dims(length - QUERIES + 1 + column // HEADS, 0)
        acc, maximum, total_weight = _attend(
            memory, first, page, token, visible, source, scale_log2, PAGE_SIZE, of_sums, FP8
        )
        # A row that sees nothing of this part has weight 0
        inverse = 1 / gl.where(total_weight == 0.0, 1.0, total_weight)
        if FP8:
            inverse *= value_scale
        acc *= gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(0, of_sums)), 0)
        sums = acc
        if FP8:
            sums = in_order(acc)
        if is_whole and not PREFIX:
            place = request.to(gl.int64) * ALL_ROWS
            store_columns(out + place * LATENT, sums, first_row, ALL_ROWS, LATENT)
        else:
            # Parts and requests only grow from piece to piece: their sum is the piece's index
            place = (part + request).to(gl.int64) * ALL_ROWS
            store_columns(partial_out + place * LATENT, sums, first_row, ALL_ROWS, LATENT)
            lse = maximum + gl.log2(total_weight)
            gl.store(partial_lse + place + column, lse, mask=column < ALL_ROWS)
        request += 1
        position = gl.load(block_starts + request)
    if SETTLED:
        wait_for_previous()  # for a part without pieces


@gluon.jit
def _read_queries(queries, offsets, exists, PIECES: gl.constexpr):
    """Returns pieces of the queries of a request, and zeros where none exist: from the pointer `queries` and the offsets
    [ROWS, WIDTH] of the first piece."""
    pieces = ()
    for piece in gl.static_range(PIECES):
        at = queries + (offsets + (piece // 2 * 128 + piece % 2 * 16))
        pieces += (gl.load(at, mask=exists, other=0.0),)  # type: ignore[assignment]
    return pieces


@gluon.jit
def _store_queries(memory, pieces, FP8: gl.constexpr):
    """Stores pieces of queries to `memory` [PIECES, ROWS, WIDTH]. For an FP8 cache they are `ordered`."""
    for piece in gl.static_range(len(pieces)):
        q = pieces[piece]
        if FP8:
            q = ordered(operand(q, FP8))
        memory.index(piece).store(q)


@gluon.jit
def _attend(
    memory,
    first,
    page,
    token,
    visible,
    source,
    scale_log2,
    PAGE_SIZE: gl.constexpr,
    of_sums: gl.constexpr,
    FP8: gl.constexpr,
):
    """Returns the sums of weighted latents [LATENT, ROWS], the maximal scores and the sums of weights [ROWS], of one
    request's blocks from `first` on. The first blocks are under way, and `page` has the pages of the next one
    (`_copy_block`). Scores are to base 2."""
    latents, _, _, _, weights = memory
    _, _, _, length, last = source
    STAGES: gl.constexpr = latents.shape[0]
    TOKENS: gl.constexpr = latents.shape[1]
    LATENT: gl.constexpr = latents.shape[2]
    ROWS: gl.constexpr = weights.shape[1]
    of_scores: gl.constexpr = token.type.layout.parent
    # Finite, so that a row which sees nothing gets weights 0 and not NaN
    maximum = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(0, of_scores))
    # Each thread sums its own tokens; the sums of all threads are added at the end
    weighed = gl.zeros([TOKENS, ROWS], gl.float32, of_scores)
    acc = gl.zeros([LATENT, ROWS], gl.float32, of_sums)
    for block in range(first, last):
        stage = (block - first) % STAGES
        # This block has arrived, for all threads
        async_copy.wait_group(STAGES - 1)
        fence_async_shared()
        gl.thread_barrier()
        scores = _scores(memory, stage, of_scores, FP8)
        seen = gl.expand_dims(block * TOKENS + token, 1) < visible
        scores = gl.where(seen, scores * scale_log2, float("-inf"))
        new = gl.maximum(maximum, gl.max(scores, 0))
        scores = gl.exp2(scores - gl.expand_dims(new, 0))
        shrink = gl.exp2(maximum - new)
        maximum = new
        weighed = weighed * gl.expand_dims(shrink, 0) + scores
        weights.store(scores.to(weights.dtype))
        acc *= gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(0, of_sums)), 0)
        fence_async_shared()
        gl.thread_barrier()
        ahead = block + STAGES
        if FP8:
            acc = fp8_sums(latents.index(stage), weights, acc)
        else:
            acc = warpgroup_mma(latents.index(stage).permute((1, 0)), weights, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
        # All threads have read this block
        gl.thread_barrier()
        page = _copy_block(memory, stage, ahead, page, length, source, PAGE_SIZE)
    return acc, maximum, gl.sum(weighed, 0)


@gluon.jit
def _scores(memory, stage, of_scores: gl.constexpr, FP8: gl.constexpr):
    """Returns the products of a block's rows and queries, [TOKENS, ROWS]."""
    latents, ropes, latent_queries, rope_queries, _ = memory
    TOKENS: gl.constexpr = latents.shape[1]
    ROWS: gl.constexpr = rope_queries.shape[1]
    if FP8:
        scores = fp8_scores(
            latents.index(stage),
            ropes.index(stage),
            latent_queries,
            rope_queries.index(0),
            of_scores,
        )
    else:
        scores = gl.zeros([TOKENS, ROWS], gl.float32, of_scores)
        scores = warpgroup_mma(
            latents.index(stage),
            latent_queries.index(0).permute((1, 0)),
            scores,
            use_acc=False,
            is_async=True,
        )
        scores = warpgroup_mma(
            ropes.index(stage), rope_queries.index(0).permute((1, 0)), scores, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
    return scores


@gluon.jit
def _copy_block(memory, stage, block, page, end, source, PAGE_SIZE: gl.constexpr):
    """Starts to copy a block's rows in front of the row `end`. They are on the pages `page`. Returns the pages of the next
    block's rows."""
    latents, ropes = memory[0].index(stage), memory[1].index(stage)
    cache, pages, tokens, length, last = source
    copy_rows(cache, page, latents, ropes, block, last, tokens, end, PAGE_SIZE)
    return pages_of_rows(pages, block + 1, tokens, length, PAGE_SIZE)


@gluon.jit
def _copy_new_rows(memory, first, new, source, PAGE_SIZE: gl.constexpr):
    """Starts to copy the rows from `new` on of the STAGES blocks from `first` on, which were copied without them. A copy
    writes zeros where it has no row, so all rows of a run of RUN are copied again."""
    latents, ropes = memory[0], memory[1]
    cache, pages, tokens, length, last = source
    STAGES: gl.constexpr = latents.shape[0]
    RUN: gl.constexpr = 16
    RUNS: gl.constexpr = latents.shape[1] // RUN  # of a block
    rows = gl.arange(0, RUN, layout=tokens.type.layout)
    async_copy.wait_group(0)
    gl.thread_barrier()
    for index in gl.static_range(STAGES * RUNS):
        run = first * RUNS + index
        if (run * RUN < length) & ((run + 1) * RUN > new) & (run < last * RUNS):
            page = pages_of_rows(pages, run, rows, length, PAGE_SIZE)
            latent = latents.index(index // RUNS).slice(index % RUNS * RUN, RUN, dim=0)
            rope = ropes.index(index // RUNS).slice(index % RUNS * RUN, RUN, dim=0)
            put_rows(cache, page, (latent, rope), run, rows, length, PAGE_SIZE)
    async_copy.commit_group()


@gluon.jit
def pages_of_rows(pages, block, tokens, length, PAGE_SIZE: gl.constexpr):
    """Returns the page of each row of a block; 0 beyond the end."""
    at = block * tokens.shape[0] + tokens
    return gl.load(pages + at // PAGE_SIZE, mask=at < length, other=0)


@gluon.jit
def copy_rows(cache, page, latents, ropes, block, last, tokens, length, PAGE_SIZE: gl.constexpr):
    """Starts to copy a block's rows as one group of copies, which is empty from the block `last` on."""
    if block < last:
        put_rows(cache, page, (latents, ropes), block, tokens, length, PAGE_SIZE)
    async_copy.commit_group()


@gluon.jit
def put_rows(cache, page, room, block, tokens, length, PAGE_SIZE: gl.constexpr):
    """Starts to copy a block's rows. Rows beyond the end belong to another request or to none, and may be NaN: zeros are
    copied instead."""
    latents, ropes = room
    LATENT: gl.constexpr = latents.shape[1]
    ROPE: gl.constexpr = ropes.shape[1]
    columns: gl.constexpr = gl.SliceLayout(0, tokens.type.layout.parent)
    at = block * tokens.shape[0] + tokens
    row = page.to(gl.int64) * PAGE_SIZE + at % PAGE_SIZE
    rows = cache + gl.expand_dims(row * (LATENT + ROPE), 1)
    exists = gl.expand_dims(at < length, 1)
    latent = gl.expand_dims(gl.arange(0, LATENT, layout=columns), 0)
    async_copy.async_copy_global_to_shared(latents, rows + latent, mask=exists)
    rope = gl.expand_dims(LATENT + gl.arange(0, ROPE, layout=columns), 0)
    async_copy.async_copy_global_to_shared(ropes, rows + rope, mask=exists)


@gluon.jit
def store_columns(out, sums, first_row, ALL_ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Writes the columns of sums [LATENT, ROWS] as the rows of a request from `first_row` on."""
    layout: gl.constexpr = sums.type.layout
    latent = gl.expand_dims(gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, layout)), 1)
    row = first_row + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout))
    row = gl.expand_dims(row, 0)
    at = out + row * WIDTH + latent
    gl.store(at, sums.to(out.dtype.element_ty), mask=row < ALL_ROWS)
