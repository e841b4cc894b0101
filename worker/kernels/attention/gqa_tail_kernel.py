"""The Triton kernel of grouped-query attention among the nodes of trees of drafts (`tree_tail.py`)."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.attention.fp8_numbers import as_words, exponent_bits
from mla_router.worker.kernels.attention.gqa_decode_kernel import (
    head_blocks,
    load_cached,
    load_queries,
)
from mla_router.worker.kernels.attention.merge_parts import Parts
from mla_router.worker.kernels.attention.tail_parts import begin_tail, visible_nodes, weigh_nodes
from mla_router.worker.kernels.attention.tree_tail import TreeTail
from mla_router.worker.kernels.kv_cache.fp8 import KVScales
from mla_router.worker.kernels.pdl import wait_for_previous


def attend_to_nodes(
    q: Tensor,
    cache: Tensor,
    tail: TreeTail,
    out: Tensor,
    *,
    kv_heads: int,
    scale: float,
    scales: KVScales,
) -> Parts:
    """Returns the results of grouped-query attention over the visible keys of `tail` alone, for `merge_parts`. A row that
    sees none has the log-sum-exp -inf. q [B, H, W], out [B, H, V] and `cache` are those of `gqa_decode`."""
    parts, options = begin_tail(tail, out)
    batch, heads, head_dim = q.shape
    block_rows = parts.schedule.tiling.block_rows
    row_blocks = triton.cdiv(heads // kv_heads * tail.queries, block_rows)
    fp8 = exponent_bits(cache.dtype)
    tail_kernel[(batch // tail.queries * kv_heads * row_blocks,)](
        q,
        as_words(cache),
        tail.visible,
        parts.out,
        parts.lse,
        scale * math.log2(math.e) * scales.keys,
        scales.values,
        q.stride(0),
        q.stride(1),
        tail.first_row,
        KV_HEADS=kv_heads,
        BLOCK_ROWS=block_rows,
        FP8=fp8,
        **head_blocks(head_dim, out.shape[-1], pair=2 if fp8 else 1),
        **options,
    )
    return parts


@triton.jit(do_not_specialize=["first_row"], do_not_specialize_on_alignment=["visible"])
def tail_kernel(
    q,
    cache,
    visible,
    tail_out,
    tail_lse,
    scale_log2,
    value_scale,
    q_stride_t,
    q_stride_h,
    first_row,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    W: tl.constexpr,
    V: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FP8: tl.constexpr,
):
    """A program attends to the nodes of one request for a block of the query rows of one KV head. BLOCK_W, BLOCK_REST and
    BLOCK_V are elements of the cache."""
    wait_for_previous()
    PAIR: tl.constexpr = 2 if FP8 else 1
    SHARE: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = SHARE * QUERIES
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    request = (tl.program_id(0) // (KV_HEADS * ROW_BLOCKS)).to(tl.int64)
    kv_head = tl.program_id(0) // ROW_BLOCKS % KV_HEADS
    row = tl.program_id(0) % ROW_BLOCKS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query, head = row // SHARE, kv_head * SHARE + row % SHARE
    is_row = (row < ROWS)[:, None]
    token = (request * QUERIES + query)[:, None]
    sees, exists = visible_nodes(visible + token, is_row, KEYS, BLOCK_KEYS)
    node = first_row + request * KEYS + tl.arange(0, BLOCK_KEYS)
    rows = (node * (KV_HEADS * (W + V) // PAIR))[:, None]
    keys = cache + rows + kv_head * (W // PAIR)
    values = cache + rows + KV_HEADS * W // PAIR + kv_head * (V // PAIR)
    queries = q + token * q_stride_t + head[:, None] * q_stride_h

    q_own = load_queries(queries, is_row, W, BLOCK_W, FP8)
    k = load_cached(keys, exists, W // PAIR, BLOCK_W, FP8)
    scores = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
    for tile in tl.static_range(PAIR):
        scores = tl.dot(q_own[tile], tl.trans(k[tile]), scores, input_precision="ieee")
    if BLOCK_REST:
        DONE: tl.constexpr = BLOCK_W * PAIR
        q_rest = load_queries(queries + DONE, is_row, W - DONE, BLOCK_REST, FP8)
        rest = load_cached(keys + BLOCK_W, exists, W // PAIR - BLOCK_W, BLOCK_REST, FP8)
        for tile in tl.static_range(PAIR):
            scores = tl.dot(q_rest[tile], tl.trans(rest[tile]), scores, input_precision="ieee")
    weights, total, lse = weigh_nodes(scores * scale_log2, sees)
    v = load_cached(values, exists, V // PAIR, BLOCK_V, FP8)
    summed = tl.dot(weights.to(v[0].dtype), v[0], input_precision="ieee")
    if FP8:
        odd = tl.dot(weights.to(v[1].dtype), v[1], input_precision="ieee")
        summed = tl.interleave(summed, odd) * value_scale

    # A request has one part, so its piece is twice its number (`partial_results`)
    places = 2 * request * (HEADS * QUERIES) + query * HEADS + head
    columns = tl.arange(0, BLOCK_V * PAIR)[None, :]
    at = places[:, None] * V + columns
    tl.store(tail_out + at, summed / total[:, None], mask=is_row & (columns < V))
    tl.store(tail_lse + places, lse, mask=row < ROWS)
