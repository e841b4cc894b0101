"""The three warpgroups of `mla_decode_fp8.py` that multiply. Each takes every third block of the program's part.

Each has sums of its own. At the end of a piece two of them leave theirs in the memory of their last blocks, and load the
queries of the next piece. The first one adds all sums and stores the result.

A softmax begins with the maximum of the blocks before. So the weights of a block and its maxima become known to all warps
with one barrier. Weights are computed once more if a maximum is much larger than before (`scaled_sums.py`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_router.worker.kernels.attention.fp8_numbers import operand
from mla_router.worker.kernels.attention.fp8_operands import (
    PIECE,
    fp8_half_sums,
    fp8_scores,
    in_order,
    ordered,
)
from mla_router.worker.kernels.attention.mla_decode_hopper import store_columns
from mla_router.worker.kernels.attention.mla_wide_sums import unknown_zero
from mla_router.worker.kernels.attention.mla_work import own_part, piece_of
from mla_router.worker.kernels.attention.scaled_sums import SLACK
from mla_router.worker.kernels.pdl import wait_for_previous

ROWS = gl.constexpr(16)  # query rows
TOKENS = gl.constexpr(64)  # of a block
TAKERS = gl.constexpr(3)  # warpgroups that multiply


@gluon.jit
def take_blocks(
    operands,
    TAKER: gl.constexpr,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    PREFIX: gl.constexpr,
    SETTLED: gl.constexpr,
    FP8: gl.constexpr,
):
    """Attends to every third block of the program's part. The taker 0 stores the results of all three."""
    ring, queries, exchange, work, of_queries, results, scale_log2 = operands
    latents, full, empty = ring[0], ring[2], ring[3]
    query_barriers = queries[2]
    block_starts = work[4]
    STAGES: gl.constexpr = latents.shape[0]
    LATENT: gl.constexpr = latents.shape[2]
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, product))
    if not SETTLED:
        wait_for_previous()
    part, request, position, end = own_part(work, 1)
    if SETTLED:
        wait_for_previous()
    step, pieces, gifts = 0, 0, 0
    while position < end:
        length, _, first, last, is_whole = piece_of(work, request, position, end, TOKENS)
        blocks = gl.maximum(last - first, 0)
        if TAKER > 0:
            _load_queries(queries, of_queries, request, pieces, TAKER - 1, HEADS, QUERIES, FP8)
        # Each new token attends to itself and the tokens before
        visible = length
        if QUERIES > 1 and not PREFIX:
            visible = gl.expand_dims(length - QUERIES + 1 + row // HEADS, 0)
        # Finite, so that a row which sees nothing gets weights 0 and not NaN
        maximum = gl.full([ROWS], -1e30, gl.float32, row.type.layout)
        low = gl.zeros([LATENT // 2, ROWS], gl.float32, product)
        sums = low, low, maximum, gl.zeros([TOKENS, ROWS], gl.float32, product)
        own = _first_of(TAKER, step)
        mbarrier.wait(query_barriers.index(0), pieces & 1)
        for at in range(own, blocks, TAKERS):
            stage = (step + at) % STAGES
            mbarrier.wait(full.index(stage), ((step + at) // STAGES) & 1)
            first_token = (first + at) * TOKENS
            sums = _add_block(
                ring, queries, exchange, stage, first_token, visible, scale_log2, sums, TAKER
            )
            gl.thread_barrier()
            # The memory of the last block is for the sums
            if TAKER == 0 or at + TAKERS < blocks:
                mbarrier.arrive(empty.index(stage))
        low, high, maximum, weighed = sums
        of_warps = exchange[1].index(TAKER)
        of_warps.store(gl.sum(weighed.reshape([TOKENS // 16, 16, ROWS]), 1))
        gl.thread_barrier()
        mbarrier.arrive(query_barriers.index(1))
        total = gl.sum(of_warps.load(_of_warps(TOKENS // 16, ROWS)), 0)
        total = gl.convert_layout(total, row.type.layout, assert_trivial=True)
        sums = low, high, maximum, total
        if TAKER == 0:
            # A bit of `gifts` for each of the others
            for other in gl.static_range(1, TAKERS):
                if _first_of(other, step) < blocks:
                    stage = (step + _last_of(other, step, blocks)) % STAGES
                    sums = _add_given(ring, exchange, stage, sums, gifts >> other, other)
                    gifts ^= 1 << other
            _store(sums, results, part, request, is_whole, row, HEADS * QUERIES, PREFIX)
        elif own < blocks:
            stage = (step + _last_of(TAKER, step, blocks)) % STAGES
            _give(ring, exchange, stage, sums, gifts, TAKER)
            gifts += 1
        step += blocks
        pieces += 1
        request += 1
        position = gl.load(block_starts + request)
    if SETTLED:
        wait_for_previous()  # for a part without pieces


@gluon.jit
def _first_of(taker, step):
    """Returns the first block of a taker in a piece that begins with the block `step` of the part."""
    return (taker + TAKERS - step % TAKERS) % TAKERS


@gluon.jit
def _last_of(taker, step, blocks):
    first = _first_of(taker, step)
    return first + (blocks - 1 - first) // TAKERS * TAKERS


@gluon.jit
def _load_queries(
    queries,
    of_queries,
    request,
    pieces,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    FP8: gl.constexpr,
):
    """Loads half of a request's queries, as soon as all takers have read those before: every second piece, from the
    piece HALF on. The rotary part belongs to the first half."""
    latent_queries, rope_queries, query_barriers = queries
    q_latent, q_pe, q_latent_stride_t, q_latent_stride_h, q_pe_stride_t, q_pe_stride_h = of_queries
    PIECES: gl.constexpr = latent_queries.shape[0]
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, loaded)), 1)
    column = gl.expand_dims(gl.arange(0, PIECE, layout=gl.SliceLayout(0, loaded)), 0)
    query, head, exists = row // HEADS, row % HEADS, row < HEADS * QUERIES
    new_token = (request * QUERIES).to(gl.int64)
    at = q_latent + new_token * q_latent_stride_t
    at += query * q_latent_stride_t + head * q_latent_stride_h
    # Every second run of 16 columns, as `fp8_scores` reads them
    at += column // 16 * 32 + column % 16 + HALF * 16
    found = gl.tuple(())
    for pair in gl.static_range(PIECES // 2):
        found += (gl.load(at + pair * 128, mask=exists, other=0.0),)
    if HALF == 0:
        at = q_pe + new_token * q_pe_stride_t
        at += query * q_pe_stride_t + head * q_pe_stride_h + column
        found += (gl.load(at, mask=exists, other=0.0),)
    mbarrier.wait(query_barriers.index(1), (pieces & 1) ^ 1)
    for pair in gl.static_range(PIECES // 2):
        latent_queries.index(2 * pair + HALF).store(ordered(operand(found[pair], FP8)))
    if HALF == 0:
        rope_queries.index(0).store(ordered(operand(found[PIECES // 2], FP8)))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(query_barriers.index(0))


@gluon.jit
def _add_block(
    ring,
    queries,
    exchange,
    stage,
    first_token,
    visible,
    scale_log2,
    sums,
    TAKER: gl.constexpr,
):
    """Adds a block to `sums`: both halves of the sums of weighted latents [LATENT / 2, ROWS], the maximal scores [ROWS] that
    they refer to, to base 2, and the sums of weights [TOKENS, ROWS], of which each thread has those of its own tokens."""
    latents, ropes, _, _ = ring
    latent_queries, rope_queries, _ = queries
    weights, maxima = exchange[0].index(TAKER), exchange[1].index(TAKER)
    low, high, maximum, weighed = sums
    WARPS: gl.constexpr = TOKENS // 16
    layout: gl.constexpr = maximum.type.layout.parent
    token = first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
    zero = unknown_zero(stage)
    scores = fp8_scores(
        latents.index(stage),
        ropes.index(stage),
        latent_queries,
        rope_queries.index(zero),
        layout,
        zero,
    )
    scores = gl.where(gl.expand_dims(token, 1) < visible, scores * scale_log2, float("-inf"))
    maxima.store(gl.max(scores.reshape([WARPS, 16, ROWS]), 1))
    found = gl.exp2(scores - gl.expand_dims(maximum, 0))
    weights.store(found.to(gl.float16))
    fence_async_shared()
    gl.thread_barrier()
    new = gl.max(maxima.load(_of_warps(WARPS, ROWS)), 0)
    new = gl.convert_layout(new, maximum.type.layout, assert_trivial=True)
    if gl.max(new - maximum, 0) > SLACK:
        new = gl.maximum(maximum, new)
        shrink = gl.exp2(maximum - new)
        low, high = _times(low, shrink), _times(high, shrink)
        weighed *= gl.expand_dims(shrink, 0)
        maximum = new
        found = gl.exp2(scores - gl.expand_dims(new, 0))
        weights.store(found.to(gl.float16))
        fence_async_shared()
        gl.thread_barrier()
    low, high = fp8_half_sums(latents.index(stage), exchange[0].index(TAKER + zero), low, high)
    return low, high, maximum, weighed + found


@gluon.jit
def _times(acc, factor):
    """Returns sums [columns, ROWS] times a factor for each row."""
    layout: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    return acc * gl.expand_dims(gl.convert_layout(factor, layout, assert_trivial=True), 0)


@gluon.constexpr_function
def _of_warps(warps: int, rows: int) -> gl.DistributedLinearLayout:
    """Returns the layout of a number for each warp and row [warps, rows]: a thread has those of all warps, for the rows
    of its scores."""
    registers = [[0, 1], [0, 8], *([1 << bit, 0] for bit in range(warps.bit_length() - 1))]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [warps, rows])


@gluon.jit
def _room(ring, stage):
    """Returns the memory of a block's latents as that of both halves of sums."""
    latents = ring[0]
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return latents.index(stage)._reinterpret(gl.float32, [2, latents.shape[2] // 2, ROWS], flat)


@gluon.jit
def _give(ring, exchange, stage, sums, gifts, TAKER: gl.constexpr):
    """Leaves sums for the adder, in the memory of the block that was added last."""
    _, _, rows, given, taken = exchange
    low, high, maximum, total = sums
    room = _room(ring, stage)
    room.index(0).store(low)
    room.index(1).store(high)
    mbarrier.wait(taken.index(TAKER), (gifts & 1) ^ 1)
    rows.index(2 * TAKER).store(maximum)
    rows.index(2 * TAKER + 1).store(total)
    gl.thread_barrier()
    mbarrier.arrive(given.index(TAKER))


@gluon.jit
def _add_given(ring, exchange, stage, sums, gifts, OTHER: gl.constexpr):
    """Adds the sums of the taker OTHER, and releases their memory."""
    _, _, rows, given, taken = exchange
    low, high, maximum, total = sums
    mbarrier.wait(given.index(OTHER), gifts & 1)
    other = rows.index(2 * OTHER).load(maximum.type.layout)
    new = gl.maximum(maximum, other)
    own, theirs = gl.exp2(maximum - new), gl.exp2(other - new)
    total = total * own + rows.index(2 * OTHER + 1).load(total.type.layout) * theirs
    room = _room(ring, stage)
    low = _times(low, own) + _times(room.index(0).load(low.type.layout), theirs)
    high = _times(high, own) + _times(room.index(1).load(high.type.layout), theirs)
    gl.thread_barrier()
    mbarrier.arrive(taken.index(OTHER))
    mbarrier.arrive(ring[3].index(stage))
    return low, high, new, total


@gluon.jit
def _store(
    sums, results, part, request, is_whole, row, ALL_ROWS: gl.constexpr, PREFIX: gl.constexpr
):
    """Writes the sums of a piece, as a result or as a partial one."""
    out, partial_out, partial_lse, value_scale = results
    low, high, maximum, total = sums
    WIDTH: gl.constexpr = 2 * low.shape[0]
    # A row that sees nothing of this part has weight 0
    factor = value_scale / gl.where(total == 0.0, 1.0, total)
    low, high = in_order(_times(low, factor)), in_order(_times(high, factor))
    if is_whole and not PREFIX:
        to = out + request.to(gl.int64) * (ALL_ROWS * WIDTH)
        store_columns(to, low, 0, ALL_ROWS, WIDTH)
        store_columns(to + WIDTH // 2, high, 0, ALL_ROWS, WIDTH)
    else:
        # Parts and requests only grow from piece to piece: their sum is the piece's index
        place = (part + request).to(gl.int64) * ALL_ROWS
        partial = partial_out + place * WIDTH
        store_columns(partial, low, 0, ALL_ROWS, WIDTH)
        store_columns(partial + WIDTH // 2, high, 0, ALL_ROWS, WIDTH)
        gl.store(partial_lse + place + row, maximum + gl.log2(total), mask=row < ALL_ROWS)
