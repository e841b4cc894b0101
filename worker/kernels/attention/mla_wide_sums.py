"""The two warpgroups of `mla_decode_wide.py` that multiply.

The first one computes the weights of the first tile of each pair and the first half of the columns of the sums, the
second one the other tile and the other half. Each hands its weights to the other. While one computes a softmax, the
tensor cores compute products of the other:

    first     scores 0 | softmax 0 | sums 0           | sums 1
    second        scores 1         | softmax 1 | sums 1     | sums 0

Both halves of the sums belong to the same maxima. The second softmax begins with the maxima of the first, and the weights
of the first tile are scaled again before they are handed over. So the two halves that each warpgroup reads alone are
released early, and come first in the scores of the next pair: only halves of a tile are copied late.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_router.worker.kernels.attention.mla_wide_rows import ROWS, TOKENS
from mla_router.worker.kernels.attention.mla_work import own_part, piece_of
from mla_router.worker.kernels.attention.scaled_sums import scaled, settled
from mla_router.worker.kernels.pdl import wait_for_previous


@gluon.jit
def _wait_full(full, place: gl.constexpr, step):
    """Waits for a half of a tile. The fence makes the copies of threads visible to the tensor cores."""
    mbarrier.wait(full.index(place), step & 1)
    fence_async_shared()


@gluon.jit
def _scores(rows, queries, tile: gl.constexpr, step, of_scores: gl.constexpr):
    """Returns the scores of a tile: the sum of three products. First comes the half that is released first."""
    latents, ropes, full, _ = rows
    latent_queries, rope_queries, _ = queries
    scores = gl.zeros([ROWS, TOKENS], gl.float32, of_scores)
    at = unknown_zero(step)
    _wait_full(full, 3 * tile, step)
    scores = warpgroup_mma(
        latent_queries.index(tile + at),
        latents.index(3 * tile + at).permute((1, 0)),
        scores,
        use_acc=False,
        is_async=True,
    )
    _wait_full(full, 1 + tile, step)
    scores = warpgroup_mma(
        rope_queries.index(at), ropes.index(tile + at).permute((1, 0)), scores, is_async=True
    )
    scores = warpgroup_mma(
        latent_queries.index(1 - tile + at),
        latents.index(1 + tile + at).permute((1, 0)),
        scores,
        is_async=True,
    )
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def unknown_zero(step):
    """Returns 0 as a number that the compiler does not know. Otherwise it computes the descriptors of all products once,
    before the loop, and has no registers for them."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0;", "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _softmax(scores, maximum, first_token, visible, least, scale_log2):
    """Returns the weights of a tile's scores and the maximum that they refer to. Each row sees `least` tokens or more."""
    columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    if first_token + TOKENS > least:
        token = first_token + gl.expand_dims(gl.arange(0, TOKENS, layout=columns), 0)
        scores = gl.where(token < visible, scores, float("-inf"))
    new = settled(maximum, gl.max(scores, 1) * scale_log2)
    return gl.exp2(scores * scale_log2 - gl.expand_dims(new, 1)), new


@gluon.jit
def _give_maximum(maximum, exchange, tile: gl.constexpr):
    exchange[1].index(tile).store(maximum)
    gl.thread_barrier()
    mbarrier.arrive(exchange[3].index(tile))


@gluon.jit
def _give_weights(values, exchange, tile: gl.constexpr, barrier: gl.constexpr):
    """Hands weights of a tile to the other warpgroup, in the memory of its rotary part, which nobody reads any more."""
    exchange[0].index(tile).store(values)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(exchange[3].index(barrier))


@gluon.jit
def _operand(weights, acc):
    """Returns weights as the first operand of a product that is added to `acc`, in registers."""
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return gl.convert_layout(weights, operand, assert_trivial=True)


@gluon.jit
def _release(barrier):
    """Passes the barrier of memory that all warps have read."""
    gl.thread_barrier()
    mbarrier.arrive(barrier)


@gluon.jit
def tile_sums(
    operands,
    TILE: gl.constexpr,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    PREFIX: gl.constexpr,
    SETTLED: gl.constexpr,
    FP8: gl.constexpr,
):
    """Computes the weights of tile TILE of each pair, and half TILE of the columns of the sums."""
    rows, queries, exchange, work, results, scale_log2 = operands
    query_barriers = queries[2]
    ALL_ROWS: gl.constexpr = HEADS * QUERIES
    ROW_BLOCKS: gl.constexpr = (ALL_ROWS + ROWS - 1) // ROWS
    HALF: gl.constexpr = rows[0].shape[2]
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    row = gl.program_id(0) % ROW_BLOCKS * ROWS + gl.arange(0, ROWS, layout=of_rows)
    if not SETTLED:
        wait_for_previous()
    part, request, position, end = own_part(work, ROW_BLOCKS)
    if SETTLED:
        wait_for_previous()
    step, pieces = 0, 0
    while position < end:
        length, _, first, last, is_whole = piece_of(work, request, position, end, 2 * TOKENS)
        visible, least = length, length - QUERIES + 1
        if not PREFIX:
            visible = gl.expand_dims(length - QUERIES + 1 + row // HEADS, 1)
        # Finite, so that a row which sees nothing gets weights 0 and not NaN
        maximum = gl.full([ROWS], -1e30, gl.float32, of_rows)
        total = gl.zeros([ROWS], gl.float32, of_rows)
        acc = gl.zeros([ROWS, HALF], gl.float32, of_sums)
        if first < last:
            mbarrier.wait(query_barriers.index(0), pieces & 1)
            for block in range(first, last):
                at = unknown_zero(step)
                scores = _scores(rows, queries, TILE, step, of_scores)
                if block + 1 == last:
                    _release(query_barriers.index(1))
                seen = (2 * block + TILE) * TOKENS, visible, least, scale_log2
                if TILE == 0:
                    acc, maximum, total = _add_first(
                        acc, maximum, total, scores, seen, rows, exchange, step, at
                    )
                else:
                    acc, maximum, total = _add_second(
                        acc, maximum, total, scores, seen, rows, exchange, step, at
                    )
                step += 1
            total = _whole_total(total, exchange, TILE, pieces)
            pieces += 1
        _store(
            acc, maximum, total, results, part, request, is_whole, row, TILE, ALL_ROWS, PREFIX, FP8
        )
        request += 1
        position = gl.load(work[4] + request)


@gluon.jit
def _add_first(acc, maximum, total, scores, seen, rows, exchange, step, at):
    """Adds a pair of tiles to the first half of the columns. Returns acc, maximum and total. `scores` [ROWS, TOKENS] are
    those of the first tile, `seen` the arguments of `_softmax` after the maximum. `at`: `unknown_zero`."""
    latents, _, full, empty = rows
    weights, maxima, _, given, _ = exchange
    first_token, visible, least, scale_log2 = seen
    values, own = _softmax(scores, maximum, first_token, visible, least, scale_log2)
    _give_maximum(own, exchange, 0)
    shrink = gl.exp2(maximum - own)
    total = total * shrink + gl.sum(values, 1)
    acc = scaled(acc, shrink)
    operand = _operand(values.to(latents.dtype), acc)
    acc = warpgroup_mma(operand, latents.index(at), acc, is_async=True)
    acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    _release(empty.index(0))
    mbarrier.wait(given.index(1), step & 1)
    maximum = maxima.index(1).load(maximum.type.layout)
    shrink = gl.exp2(own - maximum)
    values *= gl.expand_dims(shrink, 1)
    _give_weights(values.to(latents.dtype), exchange, 0, 2)
    total *= shrink
    acc = scaled(acc, shrink)
    _wait_full(full, 2, step)
    acc = warpgroup_mma(weights.index(1 + at), latents.index(2 + at), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    _release(empty.index(2))
    return acc, maximum, total


@gluon.jit
def _add_second(acc, maximum, total, scores, seen, rows, exchange, step, at):
    """Adds a pair of tiles to the second half of the columns. `scores` are those of the second tile; for the rest see
    `_add_first`."""
    latents, _, full, empty = rows
    weights, maxima, _, given, _ = exchange
    first_token, visible, least, scale_log2 = seen
    mbarrier.wait(given.index(0), step & 1)
    others = maxima.index(0).load(maximum.type.layout)
    values, own = _softmax(scores, others, first_token, visible, least, scale_log2)
    maxima.index(1).store(own)
    weights_of_tile = values.to(latents.dtype)
    _give_weights(weights_of_tile, exchange, 1, 1)
    shrink = gl.exp2(maximum - own)
    total = total * shrink + gl.sum(values, 1)
    acc = scaled(acc, shrink)
    operand = _operand(weights_of_tile, acc)
    acc = warpgroup_mma(operand, latents.index(3 + at), acc, is_async=True)
    mbarrier.wait(given.index(2), step & 1)
    _wait_full(full, 1, step)
    # Begins after the product before, without a gap
    acc = warpgroup_mma(weights.index(at), latents.index(1 + at), acc, is_async=True)
    acc, operand = warpgroup_mma_wait(1, deps=[acc, operand])
    _release(empty.index(3))
    acc = warpgroup_mma_wait(0, deps=[acc])
    _release(empty.index(1))
    return acc, own, total


@gluon.jit
def _whole_total(total, exchange, giver: gl.constexpr, pieces):
    """Returns the sum of the weights of both warpgroups."""
    _, _, totals, _, summed = exchange
    totals.index(giver).store(total)
    gl.thread_barrier()
    mbarrier.arrive(summed.index(giver))
    mbarrier.wait(summed.index(1 - giver), pieces & 1)
    return total + totals.index(1 - giver).load(total.type.layout)


@gluon.jit
def _store(
    acc,
    maximum,
    total,
    results,
    part,
    request,
    is_whole,
    row,
    half: gl.constexpr,
    ALL_ROWS: gl.constexpr,
    PREFIX: gl.constexpr,
    FP8: gl.constexpr,
):
    """Writes half of the columns of a piece, as a result or as a partial one."""
    out, partial_out, partial_lse, value_scale = results
    HALF: gl.constexpr = acc.shape[1]
    # A row that sees nothing of this part has weight 0
    inverse = 1 / gl.where(total == 0.0, 1.0, total)
    if FP8:
        inverse *= value_scale
    acc = scaled(acc, inverse)
    if is_whole and not PREFIX:
        place = request.to(gl.int64) * ALL_ROWS
        # Pairs of neighbouring columns, which a thread has, are too little to store at once
        stored: gl.constexpr = _stored_layout(HALF)
        numbers = gl.convert_layout(acc.to(out.dtype.element_ty), stored)
        _store_half(out + place * (2 * HALF), numbers, row, half, ALL_ROWS)
    else:
        # Parts and requests only grow from piece to piece: their sum is the piece's index
        place = (part + request).to(gl.int64) * ALL_ROWS
        _store_half(partial_out + place * (2 * HALF), acc, row, half, ALL_ROWS)
        if half == 0:
            gl.store(partial_lse + place + row, maximum + gl.log2(total), row < ALL_ROWS)


@gluon.jit
def _store_half(out, numbers, row, half: gl.constexpr, ALL_ROWS: gl.constexpr):
    """Writes half of the columns of the rows of a request."""
    HALF: gl.constexpr = numbers.shape[1]
    layout: gl.constexpr = numbers.type.layout
    line = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, layout)), 0)
    at = out + half * HALF + line * (2 * HALF) + column
    gl.store(at, numbers, mask=line < ALL_ROWS)


@gluon.constexpr_function
def _stored_layout(width: int) -> gl.DistributedLinearLayout:
    """Returns the layout of sums [64, width] to be stored: that of a product, but for the columns of a thread."""
    apart = [[0, 32 << bit] for bit in range((width // 32).bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *apart]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, width])
