"""The experts of one or a few tokens with quantized weights: `gemv.py`, with scales.

Rows are not quantized: weights become float32 in registers (`quantized_gemv.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.moe.tiling import Tile
from mla_router.worker.kernels.pdl import launch_options, reads_early, wait_for_previous
from mla_router.worker.kernels.quantized_gemv import (
    PIECE,
    RUN,
    columns,
    scaled_sums,
    scaled_weights,
)
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
    STAGES: tl.constexpr,
    PIECE: tl.constexpr,
    RUN: tl.constexpr,
):
    """Writes BLOCK_N of WIDTH columns of out[pair] = silu(gate) * up of its token. A token's first SHARED pairs are with
    the shared experts: their weights are read before the ids are known."""
    pair = tl.program_id(1).to(tl.int64)
    choice = pair % (SHARED + TOP_K) - SHARED
    token = pair // (SHARED + TOP_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_row = (n % WIDTH).to(tl.int64)
    SCALES: tl.constexpr = (HIDDEN + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    STEPS: tl.constexpr = (HIDDEN + PIECES * PIECE - 1) // (PIECES * PIECE)
    OF_EXPERT: tl.constexpr = (2 * WIDTH + SCALE_ROWS - 1) // SCALE_ROWS * SCALES
    chosen = ids + token * TOP_K + choice
    between = WIDTH
    if SHARED:
        if choice < 0:
            gate_row += (choice + SHARED) * WIDTH
            between = SHARED * WIDTH
            weight = shared
            scales = shared_scales
            exists = True
        else:
            weight, scales, exists = _routed(weight, scales, chosen, HIDDEN, WIDTH, OF_EXPERT)
    else:
        weight, scales, exists = _routed(weight, scales, chosen, HIDDEN, WIDTH, OF_EXPERT)
    up_row = gate_row + between
    gate_at = weight + gate_row * HIDDEN
    up_at = weight + up_row * HIDDEN
    gate_scales = scales + gate_row // SCALE_ROWS * SCALES
    up_scales = scales + up_row // SCALE_ROWS * SCALES
    gate = tl.zeros((PIECES, BLOCK_N, PIECE // RUN), tl.float32)
    up = tl.zeros((PIECES, BLOCK_N, PIECE // RUN), tl.float32)
    gates = tl.tuple(())
    ups = tl.tuple(())
    for step in tl.static_range(STEPS + STAGES):
        if step == STAGES:
            wait_for_previous()
        if step < STEPS:
            gates += scaled_weights(
                gate_at, gate_scales, step, HIDDEN, SCALE_COLUMNS, PIECES, PIECE, RUN, exists
            )
            ups += scaled_weights(
                up_at, up_scales, step, HIDDEN, SCALE_COLUMNS, PIECES, PIECE, RUN, exists
            )
        if step >= STAGES:
            k = columns(step - STAGES, PIECES, PIECE, RUN)
            row = tl.load(x + token * HIDDEN + k, k < HIDDEN, other=0.0).to(tl.float32)
            gate += scaled_sums(
                gates[2 * (step - STAGES)], gates[2 * (step - STAGES) + 1], row, RUN
            )
            up += scaled_sums(ups[2 * (step - STAGES)], ups[2 * (step - STAGES) + 1], row, RUN)
    g = tl.sum(tl.sum(gate, axis=2), axis=0)
    u = tl.sum(tl.sum(up, axis=2), axis=0)
    gated = (g / (1 + tl.exp(-g)) * u).to(out.dtype.element_ty)
    tl.store(out + pair * WIDTH + n, gated, n < WIDTH)


@triton.jit
def _routed(
    weight,
    scales,
    chosen,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Returns the addresses of a routed expert's weight and of its SCALES scales, and whether the expert exists."""
    wait_for_previous()
    expert = tl.load(chosen).to(tl.int64)
    return weight + expert * (2 * WIDTH * HIDDEN), scales + expert * SCALES, expert >= 0


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
    STAGES: tl.constexpr,
    PIECE: tl.constexpr,
    RUN: tl.constexpr,
):
    """Writes BLOCK_N columns of out[token] = the sum over k of weights[token, k] * down(gated[token, k]). Steps of the
    shared experts come first, and their weights are read before the wait. The steps of all experts are one sequence, so
    that weights of several experts are under way at once."""
    BOTH: tl.constexpr = SHARED * WIDTH
    STEP: tl.constexpr = PIECES * PIECE
    SHARED_STEPS: tl.constexpr = (BOTH + STEP - 1) // STEP
    EACH: tl.constexpr = (WIDTH + STEP - 1) // STEP
    STEPS: tl.constexpr = SHARED_STEPS + TOP_K * EACH
    SCALES: tl.constexpr = (WIDTH + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    SHARED_SCALES: tl.constexpr = (BOTH + SHARED_SCALE_COLUMNS - 1) // SHARED_SCALE_COLUMNS
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (n % HIDDEN).to(tl.int64)
    gated += token * (SHARED + TOP_K) * WIDTH
    total = tl.zeros((PIECES, BLOCK_N, PIECE // RUN), tl.float32)
    tiles = tl.tuple(())
    for step in tl.static_range(STEPS + STAGES):
        if step == min(STAGES, SHARED_STEPS):
            wait_for_previous()
        if step < SHARED_STEPS:
            at = shared + row * BOTH
            scales_at = shared_scales + row // SCALE_ROWS * SHARED_SCALES
            tiles += scaled_weights(
                at, scales_at, step, BOTH, SHARED_SCALE_COLUMNS, PIECES, PIECE, RUN
            )
        elif step < STEPS:
            pair = token * TOP_K + (step - SHARED_STEPS) // EACH
            expert = tl.load(ids + pair).to(tl.int64)
            at = weight + (expert * HIDDEN + row) * WIDTH
            blocks = expert * ((HIDDEN + SCALE_ROWS - 1) // SCALE_ROWS) + row // SCALE_ROWS
            w, scale = scaled_weights(
                at,
                scales + blocks * SCALES,
                (step - SHARED_STEPS) % EACH,
                WIDTH,
                SCALE_COLUMNS,
                PIECES,
                PIECE,
                RUN,
                expert >= 0,
            )
            tiles += (w, scale * tl.load(weights + pair))
        if step >= STAGES:
            if step - STAGES < SHARED_STEPS:
                i = columns(step - STAGES, PIECES, PIECE, RUN)
                x = tl.load(gated + i, i < BOTH, other=0.0)
            else:
                i = columns((step - STAGES - SHARED_STEPS) % EACH, PIECES, PIECE, RUN)
                before = BOTH + (step - STAGES - SHARED_STEPS) // EACH * WIDTH
                x = tl.load(gated + before + i, i < WIDTH, other=0.0)
            total += scaled_sums(
                tiles[2 * (step - STAGES)], tiles[2 * (step - STAGES) + 1], x.to(tl.float32), RUN
            )
    result = tl.sum(tl.sum(total, axis=2), axis=0)
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
        STAGES=tile.num_stages,
        PIECE=PIECE,
        RUN=RUN,
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
        STAGES=tile.num_stages,
        PIECE=PIECE,
        RUN=RUN,
        num_warps=tile.num_warps,
        **launch_options(),
    )
    return out
