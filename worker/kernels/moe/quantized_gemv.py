"""The experts of one or a few tokens with quantized weights: `gemv.py`, with scales.

Rows are not quantized: weights become float32 in registers (`quantized_gemv.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.moe.tiling import Tile
from mla_router.worker.kernels.pdl import launch_options, reads_early, wait_for_previous
from mla_router.worker.kernels.quantized_gemv import PIECE, scaled_weights
from mla_router.worker.kernels.weight import Weight


# Weights are constant as well, but their rows depend on `ids`, which are read after the wait
@reads_early({"SHARED": ("shared", "shared_scales", "weight", "scales")})
@triton.jit
def _gate_up_kernel(
    x,
    weight,
    scales,
    shared,
    shared_scales,
    ids,
    out,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Writes BLOCK_N of WIDTH columns of out[pair] = silu(gate) * up of its token. A token's first SHARED pairs are with
    the shared experts: their weights are read before the ids are known."""
    pair = tl.program_id(1).to(tl.int64)
    choice = pair % (SHARED + TOP_K) - SHARED
    token = pair // (SHARED + TOP_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_row = (n % WIDTH).to(tl.int64)
    SCALES: tl.constexpr = (HIDDEN + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    STEP: tl.constexpr = PIECES * PIECE
    between = WIDTH
    if SHARED:
        if choice < 0:
            gate_row += (choice + SHARED) * WIDTH
            between = SHARED * WIDTH
            weight = shared
            scales = shared_scales
            exists = True
        else:
            wait_for_previous()
            expert = tl.load(ids + token * TOP_K + choice).to(tl.int64)
            exists = expert >= 0
            weight += expert * (2 * WIDTH * HIDDEN)
            scales += expert * ((2 * WIDTH + SCALE_ROWS - 1) // SCALE_ROWS * SCALES)
    else:
        wait_for_previous()
        expert = tl.load(ids + token * TOP_K + choice).to(tl.int64)
        exists = expert >= 0
        weight += expert * (2 * WIDTH * HIDDEN)
        scales += expert * ((2 * WIDTH + SCALE_ROWS - 1) // SCALE_ROWS * SCALES)
    up_row = gate_row + between
    gate_at = weight + gate_row[:, None, None] * HIDDEN
    up_at = weight + up_row[:, None, None] * HIDDEN
    gate_scales = scales + (gate_row // SCALE_ROWS * SCALES)[:, None]
    up_scales = scales + (up_row // SCALE_ROWS * SCALES)[:, None]
    gate = tl.zeros((BLOCK_N, PIECES, PIECE), tl.float32)
    up = tl.zeros((BLOCK_N, PIECES, PIECE), tl.float32)
    w_gate, s_gate = scaled_weights(
        gate_at, gate_scales, 0, HIDDEN, SCALE_COLUMNS, PIECES, PIECE, exists
    )
    w_up, s_up = scaled_weights(up_at, up_scales, 0, HIDDEN, SCALE_COLUMNS, PIECES, PIECE, exists)
    wait_for_previous()
    k = tl.arange(0, PIECES)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    x_at = x + token * HIDDEN + k
    for start in tl.static_range(0, HIDDEN, STEP):
        row = tl.load(x_at + start, start + k < HIDDEN, other=0.0).to(tl.float32)[None, :, :]
        gate += w_gate.to(tl.float32) * (row * s_gate[:, :, None])
        up += w_up.to(tl.float32) * (row * s_up[:, :, None])
        if start + STEP < HIDDEN:
            w_gate, s_gate = scaled_weights(
                gate_at, gate_scales, start + STEP, HIDDEN, SCALE_COLUMNS, PIECES, PIECE, exists
            )
            w_up, s_up = scaled_weights(
                up_at, up_scales, start + STEP, HIDDEN, SCALE_COLUMNS, PIECES, PIECE, exists
            )
    g = tl.sum(tl.sum(gate, axis=2), axis=1)
    u = tl.sum(tl.sum(up, axis=2), axis=1)
    gated = (g / (1 + tl.exp(-g)) * u).to(out.dtype.element_ty)
    tl.store(out + pair * WIDTH + n, gated, n < WIDTH)


@reads_early({"SHARED": ("shared", "shared_scales")})
@triton.jit
def _down_kernel(
    gated,
    weight,
    scales,
    shared,
    shared_scales,
    weights,
    ids,
    plus,
    out,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SHARED_SCALE_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Writes BLOCK_N columns of out[token] = the sum over k of weights[token, k] * down(gated[token, k]). Shared experts
    come first, and their weights are read before the wait."""
    SCALES: tl.constexpr = (WIDTH + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    STEP: tl.constexpr = PIECES * PIECE
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_of_weight = (n % HIDDEN).to(tl.int64)
    i = tl.arange(0, PIECES)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    total = tl.zeros((BLOCK_N, PIECES, PIECE), tl.float32)
    gated += token * (SHARED + TOP_K) * WIDTH
    if SHARED:
        BOTH: tl.constexpr = SHARED * WIDTH
        SHARED_SCALES: tl.constexpr = (BOTH + SHARED_SCALE_COLUMNS - 1) // SHARED_SCALE_COLUMNS
        at = shared + row_of_weight[:, None, None] * BOTH
        scales_at = shared_scales + (row_of_weight // SCALE_ROWS * SHARED_SCALES)[:, None]
        w, scale = scaled_weights(at, scales_at, 0, BOTH, SHARED_SCALE_COLUMNS, PIECES, PIECE)
        wait_for_previous()
        for start in tl.static_range(0, BOTH, STEP):
            row = tl.load(gated + start + i, start + i < BOTH, other=0.0).to(tl.float32)
            total += w.to(tl.float32) * (row[None, :, :] * scale[:, :, None])
            if start + STEP < BOTH:
                w, scale = scaled_weights(
                    at, scales_at, start + STEP, BOTH, SHARED_SCALE_COLUMNS, PIECES, PIECE
                )
    else:
        wait_for_previous()
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(ids + pair).to(tl.int64)
        exists = expert >= 0
        share = tl.load(weights + pair)
        at = weight + expert * (HIDDEN * WIDTH) + row_of_weight[:, None, None] * WIDTH
        of_expert = scales + expert * ((HIDDEN + SCALE_ROWS - 1) // SCALE_ROWS * SCALES)
        scales_at = of_expert + (row_of_weight // SCALE_ROWS * SCALES)[:, None]
        for start in tl.static_range(0, WIDTH, STEP):
            w, scale = scaled_weights(
                at, scales_at, start, WIDTH, SCALE_COLUMNS, PIECES, PIECE, exists
            )
            row = tl.load(gated + (SHARED + k) * WIDTH + start + i, start + i < WIDTH, other=0.0)
            shared_row = (share * row.to(tl.float32))[None, :, :]
            total += w.to(tl.float32) * (shared_row * scale[:, :, None])
    result = tl.sum(tl.sum(total, axis=2), axis=1)
    at_out = token * HIDDEN + n
    if plus is not None:
        result += tl.load(plus + at_out, n < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out + at_out, result.to(out.dtype.element_ty), n < HIDDEN)


def gate_up_pairs_quantized(
    x: Tensor, gate_up: Weight, ids: Tensor, tile: Tile, shared: Weight | None = None
) -> Tensor:
    """`gate_up_pairs` of quantized weights, whose blocks have the same shape. tile.block_k is a multiple of PIECE."""
    assert gate_up.scales is not None
    _, double, hidden = gate_up.values.shape
    tokens, top_k = ids.shape
    shares = 0 if shared is None else len(shared.values) // double
    pairs = tokens * (shares + top_k)
    out = x.new_empty(pairs, double // 2)
    assert shared is None or shared.block == gate_up.block, f"{shared=}"
    _gate_up_kernel[(triton.cdiv(double // 2, tile.block_n), pairs)](
        x,
        gate_up.values,
        gate_up.scales,
        shared and shared.values,
        shared and shared.scales,
        ids,
        out,
        TOP_K=top_k,
        SHARED=shares,
        HIDDEN=hidden,
        WIDTH=double // 2,
        SCALE_ROWS=gate_up.block[0],
        SCALE_COLUMNS=gate_up.block[1],
        BLOCK_N=tile.block_n,
        PIECES=tile.block_k // PIECE,
        PIECE=PIECE,
        num_warps=tile.num_warps,
        **launch_options(),
    )
    return out


def down_pairs_quantized(
    gated: Tensor,
    down: Weight,
    weights: Tensor,
    ids: Tensor,
    tile: Tile,
    plus: Tensor | None = None,
    shared: Weight | None = None,
) -> Tensor:
    """`down_pairs` of quantized weights, whose blocks have equally many rows."""
    assert down.scales is not None
    _, hidden, width = down.values.shape
    tokens, top_k = ids.shape
    out = gated.new_empty(tokens, hidden)
    assert shared is None or shared.block[0] == down.block[0], f"{shared=}"
    _down_kernel[(triton.cdiv(hidden, tile.block_n), tokens)](
        gated,
        down.values,
        down.scales,
        shared and shared.values,
        shared and shared.scales,
        weights,
        ids,
        plus,
        out,
        TOP_K=top_k,
        SHARED=0 if shared is None else shared.values.shape[1] // width,
        HIDDEN=hidden,
        WIDTH=width,
        SCALE_ROWS=down.block[0],
        SCALE_COLUMNS=down.block[1],
        SHARED_SCALE_COLUMNS=1 if shared is None else shared.block[1],
        BLOCK_N=tile.block_n,
        PIECES=tile.block_k // PIECE,
        PIECE=PIECE,
        num_warps=tile.num_warps,
        **launch_options(),
    )
    return out
