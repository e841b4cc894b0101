"""The experts of one or a few tokens, where nearly every token-expert pair has another expert.

Sorting gains nothing there. A layer is two streams over weights: each program loads a few whole rows of weights
directly to registers, with as many loads as possible under way. A program of the second product loops over all experts
of a token and computes their weighted sum. Of a pair without an expert (id -1, weight 0) no weight is read: its loads are
masked, without a branch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.moe.tiling import Tile
from mla_router.worker.kernels.pdl import launch_options, reads_early, wait_for_previous


# `weight` is constant as well, but its rows depend on `ids`, which are read after the wait
@reads_early({"SHARED": ("shared", "weight")})
@triton.jit
def _gate_up_gemv(
    x,
    weight,
    shared,
    ids,
    out,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes BLOCK_N of WIDTH columns of out[pair] = silu(gate) * up of its token. A token's first SHARED pairs are with
    the shared experts: their weights are read before the ids are known."""
    pair = tl.program_id(1).to(tl.int64)
    choice = pair % (SHARED + TOP_K) - SHARED
    token = pair // (SHARED + TOP_K)
    if SHARED:
        if choice < 0:
            first = shared + (choice + SHARED) * (WIDTH * HIDDEN)
            between = SHARED * WIDTH * HIDDEN
            exists = True
        else:
            first, between, exists = _routed(weight, ids + token * TOP_K + choice, HIDDEN, WIDTH)
    else:
        first, between, exists = _routed(weight, ids + token * TOP_K + choice, HIDDEN, WIDTH)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    gate_at = first + (n % WIDTH)[:, None] * HIDDEN + k[None, :]
    up_at = gate_at + between
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    w_gate = _streamed(gate_at, k, HIDDEN, exists)
    w_up = _streamed(up_at, k, HIDDEN, exists)
    wait_for_previous()
    x_at = x + token * HIDDEN + k
    for start in tl.static_range(0, HIDDEN, BLOCK_K):
        row = tl.load(x_at + start, start + k < HIDDEN, other=0.0).to(tl.float32)[None, :]
        gate += w_gate.to(tl.float32) * row
        up += w_up.to(tl.float32) * row
        if start + BLOCK_K < HIDDEN:
            w_gate = _streamed(gate_at + (start + BLOCK_K), start + BLOCK_K + k, HIDDEN, exists)
            w_up = _streamed(up_at + (start + BLOCK_K), start + BLOCK_K + k, HIDDEN, exists)
    g = tl.sum(gate, axis=1)
    u = tl.sum(up, axis=1)
    gated = (g / (1 + tl.exp(-g)) * u).to(out.dtype.element_ty)
    tl.store(out + pair * WIDTH + n, gated, n < WIDTH)


@reads_early({"SHARED": ("shared",)})
@triton.jit
def _down_gemv(
    gated,
    weight,
    shared,
    weights,
    ids,
    plus,
    out,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes BLOCK_N columns of out[token] = the sum over k of weights[token, k] * down(gated[token, k]). Shared experts
    come first, and their weights are read before the wait."""
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    gated += token * (SHARED + TOP_K) * WIDTH
    row_at = (n % HIDDEN)[:, None]
    if SHARED:
        BOTH: tl.constexpr = SHARED * WIDTH
        shared_at = shared + row_at * BOTH + i[None, :]
        w = _streamed(shared_at, i, BOTH)
        wait_for_previous()
        for start in tl.static_range(0, BOTH, BLOCK_K):
            row = tl.load(gated + start + i, start + i < BOTH, other=0.0).to(tl.float32)
            total += w.to(tl.float32) * row[None, :]
            if start + BLOCK_K < BOTH:
                w = _streamed(shared_at + (start + BLOCK_K), start + BLOCK_K + i, BOTH)
    else:
        wait_for_previous()
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(ids + pair).to(tl.int64)
        share = tl.load(weights + pair)
        weight_at = weight + expert * (HIDDEN * WIDTH) + row_at * WIDTH + i[None, :]
        for start in tl.static_range(0, WIDTH, BLOCK_K):
            w = _streamed(weight_at + start, start + i, WIDTH, expert >= 0)
            row = tl.load(gated + (SHARED + k) * WIDTH + start + i, start + i < WIDTH, other=0.0)
            total += w.to(tl.float32) * (share * row.to(tl.float32))[None, :]
    result = tl.sum(total, axis=1)
    at = token * HIDDEN + n
    if plus is not None:
        result += tl.load(plus + at, n < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), n < HIDDEN)


@triton.jit
def _routed(weight, chosen, HIDDEN: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the address of a routed expert's gate rows, the distance of its up rows from them, and whether the expert
    exists."""
    wait_for_previous()
    expert = tl.load(chosen).to(tl.int64)
    return weight + expert * (2 * WIDTH * HIDDEN), WIDTH * HIDDEN, expert >= 0


@triton.jit
def _streamed(at, column, WIDTH: tl.constexpr, exists=True):
    """Loads weights that are not read again in this step: they leave L2 first. Returns zeros unless they exist."""
    mask = (column < WIDTH)[None, :] & exists
    return tl.load(at, mask, other=0.0, eviction_policy="evict_first")


def gate_up_pairs(
    x: Tensor, gate_up: Tensor, ids: Tensor, tile: Tile, shared: Tensor | None = None
) -> Tensor:
    """Returns silu(gate) * up of each pair, [T * (S + K), I] in x's dtype. x [T, N] contiguous, gate_up [E, 2I, N],
    ids [T, K] int32, shared [2SI, N]."""
    _, double, hidden = gate_up.shape
    tokens, top_k = ids.shape
    shares = 0 if shared is None else len(shared) // double
    pairs = tokens * (shares + top_k)
    out = x.new_empty(pairs, double // 2)
    _gate_up_gemv[(triton.cdiv(double // 2, tile.block_n), pairs)](
        x,
        gate_up,
        shared,
        ids,
        out,
        TOP_K=top_k,
        SHARED=shares,
        HIDDEN=hidden,
        WIDTH=double // 2,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        **launch_options(),
    )
    return out


def down_pairs(
    gated: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    tile: Tile,
    plus: Tensor | None = None,
    shared: Tensor | None = None,
) -> Tensor:
    """Returns the weighted sum of the experts of each token, [T, N] in gated's dtype. gated [T * (S + K), I] contiguous,
    down [E, N, I], weights [T, K] float32; plus [T, N], contiguous, is added to the sum; shared [N, SI]."""
    _, hidden, width = down.shape
    tokens, top_k = ids.shape
    out = gated.new_empty(tokens, hidden)
    _down_gemv[(triton.cdiv(hidden, tile.block_n), tokens)](
        gated,
        down,
        shared,
        weights,
        ids,
        plus,
        out,
        TOP_K=top_k,
        SHARED=0 if shared is None else shared.shape[1] // width,
        HIDDEN=hidden,
        WIDTH=width,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        **launch_options(),
    )
    return out
