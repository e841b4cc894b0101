"""The consumers of `hopper.py`'s kernel: each of two warpgroups computes attention of half a block's queries.

Keys arrive block by block, the last ones first: only these are masked, and with a window the first ones. The products
with the next block's keys and with this block's values are issued together. While one warpgroup computes its softmax,
the products of the other one use the tensor cores. Only the tiles that both read keep the two in step.
Sums of wide heads take longer, so their softmax begins between the two products (FlashAttention-3, Shah et al., 2024,
arXiv:2407.08608, section 3.2), and they are scaled in few blocks alone (`scaled_sums.py`). On an H200 each was
slower for narrower heads, and for all heads barriers that order the two warpgroups (section 3.1).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_router.worker.kernels.attention.ragged_attention.rings import let_go, wait_full
from mla_router.worker.kernels.attention.scaled_sums import scaled, settled
from mla_router.worker.kernels.softcap import tanh_of

QUERIES = gl.constexpr(64)  # of a warpgroup: rows of its products
WIDE = gl.constexpr(256)  # columns of wide heads' sums
ROWS_AT_ONCE = gl.constexpr(32)  # rows that `_forget` tests at once


@gluon.jit
def work_of(query_blocks, tile, HEADS: gl.constexpr):
    """Returns a row of `PrefillWork.query_blocks`."""
    at = query_blocks + 5 * (tile // HEADS)
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)


@gluon.jit
def key_blocks(
    first_sees,
    num_queries,
    num_keys,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Returns, for a block of queries, the block after the last one of its keys, the number of blocks of keys, at least
    one even without any key, and how many of them, counted from the last, end the masked ones and the unmasked ones
    after these. The others are masked by the window."""
    end = gl.maximum(gl.cdiv(gl.minimum(first_sees + BLOCK_M - 1, num_keys), BLOCK_N), 1)
    masked = gl.maximum(end - gl.minimum(first_sees, num_keys) // BLOCK_N, 1)
    blocks, whole = end, end
    if WINDOW is not None:
        first = gl.minimum(gl.maximum(first_sees - WINDOW, 0) // BLOCK_N, end - 1)
        outside = first_sees + gl.minimum(BLOCK_M, num_queries) - 1 - WINDOW
        blocks = end - first
        whole = end - gl.maximum(gl.cdiv(gl.maximum(outside, 0), BLOCK_N), first)
    return end, blocks, gl.minimum(masked, blocks), gl.maximum(whole, gl.minimum(masked, blocks))


@gluon.jit
def tile_in(round_, programs):
    """Returns the tile of a program in a round. Every second round runs backwards: a program with one of the longest
    tiles of a round has one of the shortest of the next."""
    program = gl.program_id(0)
    return round_ * programs + gl.where(round_ % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _scores(queries, keys, step, like, TWO_PARTS: gl.constexpr):
    """Starts the product of queries and keys, and returns it without a wait."""
    stage = step % keys.full.shape[0]
    scores = warpgroup_mma(
        queries.tiles.index(0),
        keys.tiles.index(stage).permute((1, 0)),
        like,
        use_acc=False,
        is_async=True,
    )
    if TWO_PARTS:
        scores = warpgroup_mma(
            queries.others.index(0),
            keys.others.index(stage).permute((1, 0)),
            scores,
            is_async=True,
        )
    return scores


@gluon.jit
def _softmax(
    scores,
    row_max,
    row_sum,
    seen,
    outside,
    columns,
    scale_log2,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
    CAP: gl.constexpr,
    IS_WIDE: gl.constexpr,
):
    """Returns the weights of a block's scores, the factor for the sums before, and the new maximum and sum."""
    factor = scale_log2
    if CAP is not None:
        scores, factor = tanh_of(scores, scale_log2 / CAP, False), CAP
    if MASKED:
        columns = gl.expand_dims(columns, 0)
        visible = columns < gl.expand_dims(seen, 1)
        if WINDOW is not None:
            visible = visible & (columns >= gl.expand_dims(outside, 1))
        scores = gl.where(visible, scores, float("-inf"))
    block_max = gl.max(scores, 1) * factor
    new_max = settled(row_max, block_max) if IS_WIDE else gl.maximum(row_max, block_max)
    base = new_max
    if MASKED:  # a row may have seen no key yet
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = gl.exp2(scores * factor - gl.expand_dims(base, 1))
    shrink = gl.exp2(row_max - base)
    return weights, new_max, row_sum * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _forget(values, left):
    """Sets rows from `left` on to 0: they belong to another chunk, and a weight of 0 does not cancel NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS_AT_ONCE, layout=gl.SliceLayout(1, layout))
    ROWS: gl.constexpr = values.shape[0]
    for first in gl.static_range(0, ROWS, ROWS_AT_ONCE):
        if left < first + ROWS_AT_ONCE:
            part = values.slice(first, ROWS_AT_ONCE)
            kept = gl.expand_dims(first + row < left, 1)
            part.store(gl.where(kept, part.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _walk(
    queries,
    keys,
    values,
    scores,
    weights,
    acc,
    row_max,
    row_sum,
    step,
    first,
    last,
    end,
    seen,
    outside,
    columns,
    scale_log2,
    TWO_PARTS: gl.constexpr,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
    CAP: gl.constexpr,
):
    """Attends to blocks of keys [first, last), counted from the last one before `end`. `weights` belong to the block
    before."""
    BLOCK_N: gl.constexpr = scores.shape[1]
    IS_WIDE: gl.constexpr = acc.shape[1] == WIDE
    for i in range(first, last):
        wait_full(keys, step)
        scores = _scores(queries, keys, step, scores, TWO_PARTS)
        stage = (step - 1) % values.full.shape[0]
        acc = warpgroup_mma(weights, values.tiles.index(stage), acc, is_async=True)
        if IS_WIDE:
            scores = warpgroup_mma_wait(1, deps=[scores])
            let_go(keys, step)
        else:
            scores, acc = warpgroup_mma_wait(0, deps=[scores, acc])
            let_go(keys, step)
            let_go(values, step - 1)
        at = (end - 1 - i) * BLOCK_N + columns
        scores, row_max, row_sum, shrink = _softmax(
            scores, row_max, row_sum, seen, outside, at, scale_log2, MASKED, WINDOW, CAP, IS_WIDE
        )
        if IS_WIDE:
            acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
            let_go(values, step - 1)
        # Just before their product: after a branch the compiler converts weights in pairs, not one by one
        wait_full(values, step)
        weights = gl.convert_layout(scores.to(values.tiles.dtype), weights.type.layout)
        if IS_WIDE:
            acc = scaled(acc, shrink)
        else:
            acc *= gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout)), 1)
        step += 1
    return scores, weights, acc, row_max, row_sum, step


@gluon.jit
def _store(sums, positions, out, lse, query_row, num_queries, head, HEADS: gl.constexpr):
    """Stores one head's results, a warpgroup's rows of a block. A row without keys is 0, and its lse -inf. `positions`:
    the rows in the block, as the sums have them and as they are stored, and the columns."""
    acc, row_max, row_sum = sums
    m, out_m, out_columns = positions
    of_rows: gl.constexpr = out_m.type.layout.parent
    V: gl.constexpr = acc.shape[1]
    share = 1 / gl.where(row_sum == 0, 1.0, row_sum)
    share = gl.convert_layout(share, gl.SliceLayout(1, acc.type.layout))
    rows = (acc * gl.expand_dims(share, 1)).to(out.dtype.element_ty)
    rows = gl.convert_layout(rows, of_rows)
    row = (query_row + out_m).to(gl.int64) * (HEADS * V) + head * V
    out_at = out + gl.expand_dims(row, 1) + gl.expand_dims(out_columns, 0)
    gl.store(out_at, rows, mask=gl.expand_dims(out_m < num_queries, 1))
    lse_at = lse + (query_row + m).to(gl.int64) * HEADS + head
    gl.store(lse_at, row_max + gl.log2(row_sum), mask=m < num_queries)


@gluon.jit
def consume(
    queries,
    FIRST: gl.constexpr,
    shared,
    work,
    HEADS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    TWO_PARTS: gl.constexpr,
    WINDOW: gl.constexpr,
    CAP: gl.constexpr,
):
    """Computes the queries from FIRST on of this program's blocks of BLOCK_M."""
    keys, values, out, lse, scale_log2 = shared
    query_blocks, tiles, programs = work
    DTYPE: gl.constexpr = queries.tiles.dtype
    BLOCK_N: gl.constexpr = keys.tiles.shape[1]
    V: gl.constexpr = values.tiles.shape[2]
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_sums, k_width=2)
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [4, 1], [1, 0])
    m = FIRST + gl.arange(0, QUERIES, layout=gl.SliceLayout(1, of_scores))
    out_m = FIRST + gl.arange(0, QUERIES, layout=gl.SliceLayout(1, of_rows))
    out_columns = gl.arange(0, V, layout=gl.SliceLayout(0, of_rows))
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, of_scores))
    step, round_, tile = 0, 0, gl.program_id(0)
    next_work = work_of(query_blocks, tile, HEADS)
    while tile < tiles:
        query_row, num_queries, _, first_sees, num_keys = next_work
        end, blocks, masked, whole = key_blocks(
            first_sees, num_queries, num_keys, BLOCK_M, BLOCK_N, WINDOW
        )
        seen = gl.minimum(first_sees + m, num_keys)
        outside = seen
        if WINDOW is not None:
            outside = first_sees + m - WINDOW
        acc = gl.zeros([QUERIES, V], gl.float32, of_sums)
        row_max = gl.full([QUERIES], float("-inf"), gl.float32, gl.SliceLayout(1, of_scores))
        row_sum = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(1, of_scores))

        wait_full(queries, round_)
        wait_full(keys, step)
        scores = gl.zeros([QUERIES, BLOCK_N], gl.float32, of_scores)
        scores = _scores(queries, keys, step, scores, TWO_PARTS)
        scores = warpgroup_mma_wait(0, deps=[scores])
        let_go(keys, step)
        at = (end - 1) * BLOCK_N
        scores, row_max, row_sum, _ = _softmax(
            scores,
            row_max,
            row_sum,
            seen,
            outside,
            at + columns,
            scale_log2,
            True,
            WINDOW,
            CAP,
            V == WIDE,
        )
        weights = gl.convert_layout(scores.to(DTYPE), of_weights)
        wait_full(values, step)
        if at + BLOCK_N > num_keys:
            _forget(values.tiles.index(step % values.full.shape[0]), num_keys - at)
        step += 1
        begins, ends = (1, masked, whole), (masked, whole, blocks)
        for part in gl.static_range(2 if WINDOW is None else 3):
            scores, weights, acc, row_max, row_sum, step = _walk(
                queries,
                keys,
                values,
                scores,
                weights,
                acc,
                row_max,
                row_sum,
                step,
                begins[part],
                ends[part],
                end,
                seen,
                outside,
                columns,
                scale_log2,
                TWO_PARTS,
                part != 1,
                WINDOW,
                CAP,
            )
        let_go(queries, round_)
        # Loaded while the last product runs
        next_tile = tile_in(round_ + 1, programs)
        next_work = work_of(query_blocks, gl.where(next_tile < tiles, next_tile, 0), HEADS)
        stage = (step - 1) % values.full.shape[0]
        acc = warpgroup_mma(weights, values.tiles.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        let_go(values, step - 1)

        sums = acc, row_max, row_sum
        positions = m, out_m, out_columns
        _store(sums, positions, out, lse, query_row, num_queries, tile % HEADS, HEADS)
        tile = next_tile
        round_ += 1
