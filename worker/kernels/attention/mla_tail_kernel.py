"""The Triton kernel of latent attention among the nodes of trees of drafts (`tree_tail.py`)."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.attention.fp8_numbers import as_words, exponent_bits
from mla_router.worker.kernels.attention.gqa_decode_kernel import load_cached, load_queries
from mla_router.worker.kernels.attention.merge_parts import Parts
from mla_router.worker.kernels.attention.tail_parts import begin_tail, visible_nodes, weigh_nodes
from mla_router.worker.kernels.attention.tree_tail import TreeTail
from mla_router.worker.kernels.pdl import wait_for_previous

_PIECE = 128  # columns of latents that are multiplied at once


def attend_to_latent_nodes(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    tail: TreeTail,
    out: Tensor,
    *,
    scale: float,
    kv_scale: float,
) -> Parts:
    """Returns the results of attention over the visible keys of `tail` alone, for `merge_parts`. A row that sees none
    has the log-sum-exp -inf. Tensors are those of `mla_decode`, `out` is its result."""
    parts, options = begin_tail(tail, out)
    (batch, heads, latent) = q_latent.shape
    rows = heads * tail.queries
    # Scores of 64 rows with 64 keys spill registers on an L40S
    most = 64 if tail.keys <= 32 else 32
    block_rows = min(max(16, triton.next_power_of_2(rows)), most)
    latent_tail_kernel[(batch // tail.queries * triton.cdiv(rows, block_rows),)](
        q_latent,
        q_pe,
        as_words(cache),
        tail.visible,
        parts.out,
        parts.lse,
        scale * math.log2(math.e) * kv_scale,
        kv_scale,
        q_latent.stride(0),
        q_latent.stride(1),
        q_pe.stride(0),
        q_pe.stride(1),
        tail.first_row,
        LATENT=latent,
        ROPE=q_pe.shape[-1],
        PIECE=min(latent, _PIECE),
        BLOCK_ROWS=block_rows,
        FP8=exponent_bits(cache.dtype),
        **options,
    )
    return parts


@triton.jit(do_not_specialize=["first_row"], do_not_specialize_on_alignment=["visible"])
def latent_tail_kernel(
    q_latent,
    q_pe,
    cache,
    visible,
    tail_out,
    tail_lse,
    scale_log2,
    value_scale,
    q_latent_stride_t,
    q_latent_stride_h,
    q_pe_stride_t,
    q_pe_stride_h,
    first_row,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FP8: tl.constexpr,
):
    """A program attends to the nodes of one request for a block of its query rows. Latents are read twice, as keys and as
    values, so that registers have PIECE columns of them at a time."""
    wait_for_previous()
    PAIR: tl.constexpr = 2 if FP8 else 1
    ROWS: tl.constexpr = HEADS * QUERIES
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    request = (tl.program_id(0) // ROW_BLOCKS).to(tl.int64)
    row = tl.program_id(0) % ROW_BLOCKS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query, head = row // HEADS, row % HEADS
    is_row = (row < ROWS)[:, None]
    token, head = (request * QUERIES + query)[:, None], head[:, None]
    sees, exists = visible_nodes(visible + token, is_row, KEYS, BLOCK_KEYS)
    node = first_row + request * KEYS + tl.arange(0, BLOCK_KEYS)
    keys = cache + (node * ((LATENT + ROPE) // PAIR))[:, None]
    latents = q_latent + token * q_latent_stride_t + head * q_latent_stride_h
    ropes = q_pe + token * q_pe_stride_t + head * q_pe_stride_h

    scores = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
    q = load_queries(ropes, is_row, ROPE, ROPE // PAIR, FP8)
    k = load_cached(keys + LATENT // PAIR, exists, ROPE // PAIR, ROPE // PAIR, FP8)
    for tile in tl.static_range(PAIR):
        scores = tl.dot(q[tile], tl.trans(k[tile]), scores, input_precision="ieee")
    for piece in tl.static_range(0, LATENT, PIECE):
        q = load_queries(latents + piece, is_row, PIECE, PIECE // PAIR, FP8)
        k = load_cached(keys + piece // PAIR, exists, PIECE // PAIR, PIECE // PAIR, FP8)
        for tile in tl.static_range(PAIR):
            scores = tl.dot(q[tile], tl.trans(k[tile]), scores, input_precision="ieee")
    weights, total, lse = weigh_nodes(scores * scale_log2, sees)

    # A request has one part, so its piece is twice its number (`partial_results`)
    place = 2 * request * ROWS + row
    tl.store(tail_lse + place, lse, mask=row < ROWS)
    columns = tl.arange(0, PIECE)[None, :]
    for piece in tl.static_range(0, LATENT, PIECE):
        v = load_cached(keys + piece // PAIR, exists, PIECE // PAIR, PIECE // PAIR, FP8)
        summed = tl.dot(weights.to(v[0].dtype), v[0], input_precision="ieee")
        if FP8:
            odd = tl.dot(weights.to(v[1].dtype), v[1], input_precision="ieee")
            summed = tl.interleave(summed, odd) * value_scale
        at = tail_out + place[:, None] * LATENT + piece + columns
        tl.store(at, summed / total[:, None], mask=is_row)
