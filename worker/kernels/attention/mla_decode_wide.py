"""The kernel of `mla_decode` for Hopper's tensor cores (sm_90), in Gluon, for more than 32 query rows, or more than 64
over an FP8 cache. Query rows are heads times new tokens of a request.

A program has 64 query rows, as many as a warpgroup multiplies at least. The sums [64, LATENT] of 512 columns fill half of
the registers of a multiprocessor, so there is one program of two warpgroups, each with half of the columns
(`mla_wide_sums.py`). The division, and the order of its steps, are FlashMLA's (github.com/deepseek-ai/FlashMLA,
docs/20250422-new-kernel-deep-dive.md). A third warpgroup copies queries and cached rows (`mla_wide_rows.py`), and
converts those of an FP8 cache (`mla_wide_fp8.py`), for which it has more registers.

A block is a pair of tiles of 64 tokens. Shared memory has room for the queries and one pair, in four halves: tokens of a
tile, columns of a warpgroup. Each half has two barriers, as the tiles of `ragged_attention/rings.py` have.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_router.worker.kernels.attention.mla_decode_kernel import SETTLED_ARGUMENTS
from mla_router.worker.kernels.attention.mla_wide_fp8 import convert_pieces
from mla_router.worker.kernels.attention.mla_wide_rows import COPIERS, ROWS, TOKENS, copy_pieces
from mla_router.worker.kernels.attention.mla_wide_sums import tile_sums
from mla_router.worker.kernels.pdl import reads_early

CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(216), gl.constexpr(72)  # of a thread
FP8_CONSUMER_REGISTERS, FP8_PRODUCER_REGISTERS = gl.constexpr(208), gl.constexpr(96)


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
    value_scale,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    LATENT: gl.constexpr,
    ROPE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PREFIX: gl.constexpr,
    SETTLED: gl.constexpr,
    FP8: gl.constexpr,
):
    DTYPE: gl.constexpr = gl.float16 if FP8 else cache.dtype.element_ty
    ARRIVALS: gl.constexpr = 1 if FP8 else COPIERS
    HALF: gl.constexpr = LATENT // 2
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    latents = gl.allocate_shared_memory(DTYPE, [4, TOKENS, HALF], lines)  # two halves of each tile
    ropes = gl.allocate_shared_memory(DTYPE, [2, TOKENS, ROPE], lines)
    latent_queries = gl.allocate_shared_memory(DTYPE, [2, ROWS, HALF], lines)
    rope_queries = gl.allocate_shared_memory(DTYPE, [1, ROWS, ROPE], lines)
    maxima = gl.allocate_shared_memory(gl.float32, [2, ROWS], plain)
    totals = gl.allocate_shared_memory(gl.float32, [2, ROWS], plain)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], barriers)
    query_barriers = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)  # full, empty
    # Maxima of the first tile, weights and maxima of the second, weights of the first
    given = gl.allocate_shared_memory(gl.int64, [3, 1], barriers)
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(query_barriers.index(0), count=ARRIVALS)
    mbarrier.init(query_barriers.index(1), count=2)
    for i in gl.static_range(3):
        mbarrier.init(given.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(summed.index(i), count=1)

    rows = latents, ropes, full, empty
    queries = latent_queries, rope_queries, query_barriers
    exchange = ropes, maxima, totals, given, summed
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
    results = out, partial_out, partial_lse, value_scale
    operands = rows, queries, exchange, work, results, scale_log2
    of_queries = (
        q_latent,
        q_pe,
        q_latent_stride_t,
        q_latent_stride_h,
        q_pe_stride_t,
        q_pe_stride_h,
    )
    gl.warp_specialize(
        [
            (tile_sums, (operands, 0, HEADS, QUERIES, PREFIX, SETTLED, FP8)),
            (tile_sums, (operands, 1, HEADS, QUERIES, PREFIX, SETTLED, FP8)),
            (
                _copies,
                (rows, queries, work, of_queries, cache, HEADS, QUERIES, PAGE_SIZE, SETTLED, FP8),
            ),
        ],
        [4, 4],
        [
            FP8_CONSUMER_REGISTERS if FP8 else CONSUMER_REGISTERS,
            FP8_PRODUCER_REGISTERS if FP8 else PRODUCER_REGISTERS,
        ],
    )


@gluon.jit
def _copies(
    rows,
    queries,
    work,
    of_queries,
    cache,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SETTLED: gl.constexpr,
    FP8: gl.constexpr,
):
    if FP8:
        convert_pieces(
            rows, queries, work, of_queries, cache, HEADS, QUERIES, PAGE_SIZE, SETTLED, FP8
        )
    else:
        copy_pieces(rows, queries, work, of_queries, cache, HEADS, QUERIES, PAGE_SIZE, SETTLED)
