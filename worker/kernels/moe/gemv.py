"""The experts for one or a few tokens: nearly every token-expert pair has an expert to itself.

Then nothing is gained by sorting, and a layer is two streams over weights: each program reads a few whole
rows of them, straight into registers, so that as many loads as possible are under way at once. The
second one goes through all experts of a token, which makes their weighted sum its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.moe.tiling import Tile
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous


@triton.jit
def _gate_up_gemv(
    x,
    weight,
    ids,
    out,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[pair] = silu(gate) * up of its token, BLOCK_N of its WIDTH columns."""
    wait_for_previous()
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + pair).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    gate_at = weight + expert * (2 * WIDTH * HIDDEN) + (n % WIDTH)[:, None] * HIDDEN + k[None, :]
    x_at = x + pair // TOP_K * HIDDEN + k
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_K):
        inside = start + k < HIDDEN
        # Nobody reads the weights again before the next step: they need not push others out of L2
        w_gate = tl.load(gate_at + start, inside[None, :], other=0.0, eviction_policy="evict_first")
        w_up = tl.load(
            gate_at + (WIDTH * HIDDEN + start),
            inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        row = tl.load(x_at + start, inside, other=0.0).to(tl.float32)[None, :]
        gate += w_gate.to(tl.float32) * row
        up += w_up.to(tl.float32) * row
    g = tl.sum(gate, axis=1)
    u = tl.sum(up, axis=1)
    gated = (g / (1 + tl.exp(-g)) * u).to(out.dtype.element_ty)
    tl.store(out + pair * WIDTH + n, gated, n < WIDTH)


@triton.jit
def _down_gemv(
    gated,
    weight,
    weights,
    ids,
    plus,
    out,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[token] = sum over k of weights[token, k] * down(gated[token, k]), BLOCK_N of its columns."""
    wait_for_previous()
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(ids + pair).to(tl.int64)
        share = tl.load(weights + pair)
        weight_at = weight + expert * (HIDDEN * WIDTH) + (n % HIDDEN)[:, None] * WIDTH + i[None, :]
        for start in tl.static_range(0, WIDTH, BLOCK_K):
            inside = start + i < WIDTH
            w = tl.load(
                weight_at + start, inside[None, :], other=0.0, eviction_policy="evict_first"
            )
            row = tl.load(gated + pair * WIDTH + start + i, inside, other=0.0)
            total += w.to(tl.float32) * (share * row.to(tl.float32))[None, :]
    result = tl.sum(total, axis=1)
    at = token * HIDDEN + n
    if plus is not None:
        result += tl.load(plus + at, n < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), n < HIDDEN)


def gate_up_pairs(x: Tensor, gate_up: Tensor, ids: Tensor, tile: Tile) -> Tensor:
    """[T * K, I] in x's dtype. x [T, N] contiguous, gate_up [E, 2I, N], ids [T, K] int32."""
    _, double, hidden = gate_up.shape
    out = x.new_empty(ids.numel(), double // 2)
    _gate_up_gemv[(triton.cdiv(double // 2, tile.block_n), ids.numel())](
        x,
        gate_up,
        ids,
        out,
        TOP_K=ids.shape[1],
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
) -> Tensor:
    """[T, N] in gated's dtype. gated [T * K, I] contiguous, down [E, N, I], weights [T, K] float32,
    plus [T, N] contiguous: added to the sum."""
    _, hidden, width = down.shape
    tokens, top_k = ids.shape
    out = gated.new_empty(tokens, hidden)
    _down_gemv[(triton.cdiv(hidden, tile.block_n), tokens)](
        gated,
        down,
        weights,
        ids,
        plus,
        out,
        TOP_K=top_k,
        HIDDEN=hidden,
        WIDTH=width,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        **launch_options(),
    )
    return out
