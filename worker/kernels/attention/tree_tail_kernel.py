"""The Triton kernel of attention among the nodes of trees of drafts (`tree_tail.py`)."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.attention.gqa_decode_kernel import load_cached, load_queries
from mla_router.worker.kernels.attention.merge_parts import Parts, partial_results
from mla_router.worker.kernels.attention.tree_tail import TreeTail
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous


def attend_to_nodes(
    q: Tensor, cache: Tensor, tail: TreeTail, out: Tensor, *, kv_heads: int, scale: float
) -> Parts:
    """Returns the results of grouped-query attention over the visible keys of `tail` alone, for `merge_parts`. A row that
    sees none has the log-sum-exp -inf. q [B, H, W], out [B, H, V] and `cache` are those of `gqa_decode`."""
    schedule = tail.schedule
    assert schedule is not None, "a tail that is not planned for a GPU"
    (batch, heads, head_dim), v_head_dim = q.shape, out.shape[-1]
    requests, row_blocks = batch // tail.queries, heads // kv_heads * tail.queries
    tiling = schedule.tiling
    row_blocks = triton.cdiv(row_blocks, tiling.block_rows)
    own = max(16, 1 << (head_dim.bit_length() - 1))
    rest = max(16, triton.next_power_of_2(head_dim - own)) if head_dim > own else 0
    parts = Parts(*partial_results(schedule, out, heads * tail.queries), schedule)
    tail_kernel[(requests * kv_heads * row_blocks,)](
        q,
        cache,
        tail.visible,
        parts.out,
        parts.lse,
        scale * math.log2(math.e),
        q.stride(0),
        q.stride(1),
        tail.first_row,
        HEADS=heads,
        KV_HEADS=kv_heads,
        W=head_dim,
        V=v_head_dim,
        BLOCK_W=own,
        BLOCK_REST=rest,
        BLOCK_V=max(16, triton.next_power_of_2(v_head_dim)),
        QUERIES=tail.queries,
        KEYS=tail.keys,
        BLOCK_KEYS=max(16, triton.next_power_of_2(tail.keys)),
        BLOCK_ROWS=tiling.block_rows,
        num_warps=4,
        **launch_options(),
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
):
    """A program attends to the nodes of one request for a block of the query rows of one KV head."""
    wait_for_previous()
    SHARE: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = SHARE * QUERIES
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    request = (tl.program_id(0) // (KV_HEADS * ROW_BLOCKS)).to(tl.int64)
    kv_head = tl.program_id(0) // ROW_BLOCKS % KV_HEADS
    row = tl.program_id(0) % ROW_BLOCKS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query, head = row // SHARE, kv_head * SHARE + row % SHARE
    is_row = row < ROWS
    node = tl.arange(0, BLOCK_KEYS)
    bits = tl.load(visible + request * QUERIES + query, is_row, other=0)
    sees = ((bits[:, None] >> node[None, :].to(tl.int64)) & 1 != 0) & (node < KEYS)[None, :]
    # Rows that nobody sees may be of another step, and NaN
    exists = (tl.max(sees.to(tl.int32), 0) > 0)[:, None]

    rows = ((first_row + request * KEYS + node) * (KV_HEADS * (W + V)))[:, None]
    keys = cache + rows + kv_head * W
    values = cache + rows + KV_HEADS * W + kv_head * V
    queries = q + (request * QUERIES + query)[:, None] * q_stride_t + head[:, None] * q_stride_h
    q_own = load_queries(queries, is_row[:, None], W, BLOCK_W, 0)
    k = load_cached(keys, exists, W, BLOCK_W, 0)
    scores = tl.dot(q_own[0], tl.trans(k[0]), input_precision="ieee")
    if BLOCK_REST:
        q_rest = load_queries(queries + BLOCK_W, is_row[:, None], W - BLOCK_W, BLOCK_REST, 0)
        rest = load_cached(keys + BLOCK_W, exists, W - BLOCK_W, BLOCK_REST, 0)
        scores = tl.dot(q_rest[0], tl.trans(rest[0]), scores, input_precision="ieee")
    scores = tl.where(sees, scores * scale_log2, float("-inf"))
    maximum = tl.max(scores, 1)
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    weights = tl.exp2(scores - maximum[:, None])
    total = tl.sum(weights, 1)
    v = load_cached(values, exists, V, BLOCK_V, 0)
    summed = tl.dot(weights.to(v[0].dtype), v[0], input_precision="ieee")
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    lse = tl.where(none, float("-inf"), maximum + tl.log2(total))

    # A request has one part, so its piece is twice its number (`partial_results`)
    places = 2 * request * (HEADS * QUERIES) + query * HEADS + head
    columns = tl.arange(0, BLOCK_V)[None, :]
    at = places[:, None] * V + columns
    tl.store(tail_out + at, summed / total[:, None], mask=is_row[:, None] & (columns < V))
    tl.store(tail_lse + places, lse, mask=is_row)
