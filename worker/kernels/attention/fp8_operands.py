"""FP8 rows of a KV cache as first operands of Hopper's products, for `mla_decode_hopper.py`.

`wgmma` takes its first operand from shared memory, in its own dtype and order, or from registers. So FP8 rows are read
from shared memory into registers, and converted there to float16, which has all numbers of both FP8 formats. The other
operand, queries or weights, stays in shared memory.

The order of the columns of a product's inner dimension, and of its rows, is free if both operands, or the result, have
the same order. It is chosen so that a thread reads words of 4 numbers or more without bank conflicts, and has the
numbers that the product wants from it: registers need no exchange. `assert_trivial` checks that.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

PIECE = gl.constexpr(64)  # columns of a product of queries and cached rows


@gluon.jit
def ordered(x):
    """Returns x [rows, 64] with its columns in the order of `fp8_scores`."""
    ROWS: gl.constexpr = x.shape[0]
    return x.reshape([ROWS, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([ROWS, 64])


@gluon.jit
def fp8_scores(latents, ropes, latent_queries, rope_queries, of_scores: gl.constexpr, zero=0):
    """Returns the products of cached rows, `latents` [TOKENS, 512] and `ropes` [TOKENS, 64], and queries [ROWS, 512 |
    64], as [TOKENS, ROWS] in the layout `of_scores`. A piece of the latent queries has every second run of 16 columns,
    and both kinds of queries are `ordered`. `zero`: `unknown_zero`, for a caller with few registers."""
    operand: gl.constexpr = gl.DotOperandLayout(0, of_scores, 2)
    TOKENS: gl.constexpr = latents.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    of_pair: gl.constexpr = rows_layout(TOKENS, 2 * PIECE, WARPS)
    of_piece: gl.constexpr = rows_layout(TOKENS, PIECE, WARPS)
    ROWS: gl.constexpr = rope_queries.shape[0]
    PIECES: gl.constexpr = latent_queries.shape[0]
    scores = gl.zeros([TOKENS, ROWS], gl.float32, of_scores)
    keys = ropes.load(of_piece).to(gl.float16)
    before = gl.convert_layout(ordered(keys), operand, assert_trivial=True)
    scores = warpgroup_mma(
        before, rope_queries.permute((1, 0)), scores, use_acc=False, is_async=True
    )
    for pair in gl.static_range(PIECES // 2):
        rows = latents.slice(pair * 128, 128, dim=1).load(of_pair)
        halves = gl.split(rows.reshape([TOKENS, 4, 2, 16]).permute((0, 1, 3, 2)))
        for half in gl.static_range(2):
            keys = halves[half].reshape([TOKENS, 64]).to(gl.float16)
            keys = gl.convert_layout(ordered(keys), operand, assert_trivial=True)
            queries = latent_queries.index(2 * pair + half + zero).permute((1, 0))
            scores = warpgroup_mma(keys, queries, scores, is_async=True)
            # Registers of an operand are in use until its product ends
            scores, _ = warpgroup_mma_wait(1, deps=[scores, before])
            before = keys
    scores, _ = warpgroup_mma_wait(0, deps=[scores, before])
    return scores


@gluon.jit
def fp8_sums(latents, weights, acc):
    """Returns `acc` [512, ROWS] and the product of transposed `latents` [TOKENS, 512] and `weights` [TOKENS, ROWS]. The
    rows are in an order of their own (`in_order`)."""
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    TOKENS: gl.constexpr = latents.shape[0]
    layout: gl.constexpr = columns_layout(latents.shape[1], gl.num_warps())
    before = acc
    for step in gl.static_range(TOKENS // 16):
        values = _columns(latents.slice(step * 16, 16, dim=0), layout, operand)
        acc = warpgroup_mma(values, weights.slice(step * 16, 16, dim=0), acc, is_async=True)
        if step > 0:
            acc, _ = warpgroup_mma_wait(1, deps=[acc, before])
        before = values
    acc, _ = warpgroup_mma_wait(0, deps=[acc, before])
    return acc


@gluon.jit
def fp8_half_sums(latents, weights, low, high):
    """Returns the results of `fp8_sums` for the first half of the latents and for the second one. It needs fewer registers:
    an operand has half of the numbers."""
    operand: gl.constexpr = gl.DotOperandLayout(0, low.type.layout, 2)
    TOKENS: gl.constexpr = latents.shape[0]
    HALF: gl.constexpr = latents.shape[1] // 2
    layout: gl.constexpr = columns_layout(HALF, gl.num_warps())
    others = high
    for step in gl.static_range(TOKENS // 16):
        rows = latents.slice(step * 16, 16, dim=0)
        of_rows = weights.slice(step * 16, 16, dim=0)
        values = _columns(rows.slice(0, HALF, dim=1), layout, operand)
        low = warpgroup_mma(values, of_rows, low, is_async=True)
        if step > 0:
            high, _ = warpgroup_mma_wait(1, deps=[high, others])
        others = _columns(rows.slice(HALF, HALF, dim=1), layout, operand)
        high = warpgroup_mma(others, of_rows, high, is_async=True)
        low, _ = warpgroup_mma_wait(1, deps=[low, values])
    high, _ = warpgroup_mma_wait(0, deps=[high, others])
    return low, high


@gluon.jit
def _columns(rows, layout: gl.constexpr, operand: gl.constexpr):
    """Returns transposed cached rows [16, LATENT] as an operand [LATENT, 16], in the order of `fp8_sums`."""
    LATENT: gl.constexpr = rows.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    RUNS: gl.constexpr = LATENT // (32 * WARPS)
    values = rows.load(layout).to(gl.float16)
    values = values.permute((1, 0)).reshape([WARPS, RUNS, 8, 2, 2, 16])
    values = values.permute((1, 3, 0, 4, 2, 5)).reshape([LATENT, 16])
    return gl.convert_layout(values, operand, assert_trivial=True)


@gluon.jit
def in_order(acc):
    """Returns the rows of `fp8_sums` in the order of latents."""
    LATENT: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    RUNS: gl.constexpr = LATENT // (32 * WARPS)
    layout: gl.constexpr = sums_layout(LATENT, ROWS, WARPS)
    acc = acc.reshape([RUNS, 2, WARPS, 2, 8, ROWS]).permute((2, 0, 4, 1, 3, 5))
    return gl.convert_layout(acc.reshape([LATENT, ROWS]), layout, assert_trivial=True)


@gluon.constexpr_function
def rows_layout(tokens: int, width: int, warps: int) -> gl.DistributedLinearLayout:
    """Returns the layout of cached rows [tokens, width] as rows of a product. A thread has 2 of the 16 rows of its
    warp, and in each row one or two runs of 16 neighbouring numbers."""
    run = width // 4
    inside = [[0, 1 << bit] for bit in range(run.bit_length() - 1)]
    lanes = [[0, run], [0, 2 * run], [1, 0], [2, 0], [4, 0]]
    # Warpgroups beyond the tokens have the same rows
    apart = [[16 << bit if 16 << bit < tokens else 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([*inside, [8, 0]], lanes, apart, [], [tokens, width])


@gluon.constexpr_function
def columns_layout(latent: int, warps: int) -> gl.DistributedLinearLayout:
    """Returns the layout of 16 cached rows [16, latent], whose columns are the rows of a product. A thread has 4 of the
    rows, and in each row runs of 4 neighbouring numbers, 32 apart."""
    apart = [[0, 32 << bit] for bit in range((latent // 32).bit_length() - 1)]
    runs = (latent // 32 // warps).bit_length() - 1
    registers = [[0, 1], [0, 2], *apart[:runs], [1, 0], [8, 0]]
    lanes = [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout(registers, lanes, apart[runs:], [], [16, latent])


@gluon.constexpr_function
def sums_layout(latent: int, rows: int, warps: int) -> gl.DistributedLinearLayout:
    """Returns the layout of sums [latent, rows] `in_order`: a thread has the columns of `columns_layout` as rows, and
    every 8th pair of columns. Neighbouring rows are next to each other, so that they are stored at once."""
    apart = [[32 << bit, 0] for bit in range((latent // 32).bit_length() - 1)]
    runs = (latent // 32 // warps).bit_length() - 1
    columns = [[0, 8 << bit] for bit in range((rows // 8).bit_length() - 1)]
    registers = [[1, 0], [2, 0], [0, 1], *columns, *apart[:runs]]
    lanes = [[0, 2], [0, 4], [4, 0], [8, 0], [16, 0]]
    return gl.DistributedLinearLayout(registers, lanes, apart[runs:], [], [latent, rows])
