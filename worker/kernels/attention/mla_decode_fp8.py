"""The kernel of `mla_decode` for up to 16 query rows of many requests over an FP8 cache, for Hopper's tensor cores (sm_90),
in Gluon.

Its products are those of `mla_decode_hopper.py`, whose first operands, cached rows, are converted in registers. That takes
longer than copying the rows, since eight warps, of two programs, wait for each other most of the time. So here a program
has three warpgroups that multiply (`mla_fp8_sums.py`), as many as a multiprocessor has registers for. They take blocks in
turn, and share the queries and a ring of blocks. A fourth warpgroup copies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_router.worker.kernels.attention.fp8_operands import PIECE
from mla_router.worker.kernels.attention.mla_decode_hopper import pages_of_rows, put_rows
from mla_router.worker.kernels.attention.mla_decode_kernel import SETTLED_ARGUMENTS
from mla_router.worker.kernels.attention.mla_fp8_sums import (
    ROWS,
    TAKERS,
    TOKENS,
    take_blocks,
)
from mla_router.worker.kernels.attention.mla_work import own_part, piece_of
from mla_router.worker.kernels.pdl import reads_early, wait_for_previous

COPIERS = gl.constexpr(128)  # threads that copy
TAKER_REGISTERS, COPIER_REGISTERS = gl.constexpr(160), gl.constexpr(32)  # of a thread


@reads_early({"SETTLED": (*SETTLED_ARGUMENTS, "cache")})
@gluon.jit(do_not_specialize=["num_requests", "page_table_stride"])
def attend_fp8_kernel(
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
    STAGES: gl.constexpr,
    PREFIX: gl.constexpr,
    SETTLED: gl.constexpr,
    FP8: gl.constexpr,
):
    CACHED: gl.constexpr = cache.dtype.element_ty
    latent_lines: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    query_lines: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    weight_lines: gl.constexpr = gl.NVMMASharedLayout(32, 16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    latents = gl.allocate_shared_memory(CACHED, [STAGES, TOKENS, LATENT], latent_lines)
    ropes = gl.allocate_shared_memory(CACHED, [STAGES, TOKENS, ROPE], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    latent_queries = gl.allocate_shared_memory(
        gl.float16, [LATENT // PIECE, ROWS, PIECE], query_lines
    )
    rope_queries = gl.allocate_shared_memory(gl.float16, [1, ROWS, ROPE], query_lines)
    query_barriers = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)  # full, empty
    # Of each taker
    weights = gl.allocate_shared_memory(gl.float16, [TAKERS, TOKENS, ROWS], weight_lines)
    maxima = gl.allocate_shared_memory(gl.float32, [TAKERS, TOKENS // 16, ROWS], flat)
    gifts = gl.allocate_shared_memory(gl.float32, [2 * TAKERS, ROWS], line)  # maxima, totals
    given = gl.allocate_shared_memory(gl.int64, [TAKERS, 1], barriers)
    taken = gl.allocate_shared_memory(gl.int64, [TAKERS, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=COPIERS)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(query_barriers.index(0), count=2)
    mbarrier.init(query_barriers.index(1), count=TAKERS)
    for taker in gl.static_range(TAKERS):
        mbarrier.init(given.index(taker), count=1)
        mbarrier.init(taken.index(taker), count=1)

    ring = latents, ropes, full, empty
    queries = latent_queries, rope_queries, query_barriers
    exchange = weights, maxima, gifts, given, taken
    work = (
        page_table,
        slots,
        lengths,
        skipped,
        block_starts,
        first_requests,
        part_size,
        num_requests,
        page_table_stride,
    )
    of_queries = (
        q_latent,
        q_pe,
        q_latent_stride_t,
        q_latent_stride_h,
        q_pe_stride_t,
        q_pe_stride_h,
    )
    results = out, partial_out, partial_lse, value_scale
    operands = ring, queries, exchange, work, of_queries, results, scale_log2
    gl.warp_specialize(
        [
            (_copy_blocks, (ring, work, cache, 0 if PREFIX else QUERIES, PAGE_SIZE, SETTLED)),
            (take_blocks, (operands, 0, HEADS, QUERIES, PREFIX, SETTLED, FP8)),
            (take_blocks, (operands, 1, HEADS, QUERIES, PREFIX, SETTLED, FP8)),
            (take_blocks, (operands, 2, HEADS, QUERIES, PREFIX, SETTLED, FP8)),
        ],
        [4, 4, 4],
        [TAKER_REGISTERS, TAKER_REGISTERS, TAKER_REGISTERS],
    )


@gluon.jit
def _copy_blocks(
    ring, work, cache, NEW: gl.constexpr, PAGE_SIZE: gl.constexpr, SETTLED: gl.constexpr
):
    """Copies the blocks of all pieces, each as soon as its memory is released. The last NEW rows of a request are not
    settled (`pdl.py`)."""
    latents, ropes, full, empty = ring
    block_starts = work[4]
    STAGES: gl.constexpr = latents.shape[0]
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    tokens = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, copied))
    if not SETTLED:
        wait_for_previous()
    _part, request, position, end = own_part(work, 1)
    step = 0
    while position < end:
        length, pages, first, last, _ = piece_of(work, request, position, end, TOKENS)
        page = pages_of_rows(pages, first, tokens, length, PAGE_SIZE)
        for block in range(first, last):
            if SETTLED and (block + 1) * TOKENS > length - NEW:
                wait_for_previous()
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            room = latents.index(stage), ropes.index(stage)
            put_rows(cache, page, room, block, tokens, length, PAGE_SIZE)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            page = pages_of_rows(pages, block + 1, tokens, length, PAGE_SIZE)
            step += 1
        request += 1
        position = gl.load(block_starts + request)
    if SETTLED:
        wait_for_previous()  # for a part without new rows
