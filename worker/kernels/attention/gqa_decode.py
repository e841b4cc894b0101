"""Decode of grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245): one new token per request over paged keys
and values, with several query heads for each KV head.

Multi-head attention has one query head for each KV head, multi-query attention has one KV head.

On a GPU it is split-KV attention (Flash-Decoding, pytorch.org/blog/flash-decoding) over the equal parts of a
`DecodeSchedule`, then a merge of the requests with several parts, as in `mla_decode`.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from mla_router.worker.kernels.attention.decode_schedule import DecodeSchedule
from mla_router.worker.kernels.attention.fp8_numbers import as_words, exponent_bits
from mla_router.worker.kernels.attention.gqa_decode_kernel import attend_kernel, head_blocks
from mla_router.worker.kernels.attention.gqa_tail_kernel import attend_to_nodes
from mla_router.worker.kernels.attention.merge_parts import merge_parts, partial_results
from mla_router.worker.kernels.attention.tree_tail import TreeTail
from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.kv_cache.fp8 import UNSCALED, KVScales
from mla_router.worker.kernels.kv_cache.gather import kv_take
from mla_router.worker.kernels.kv_cache.gqa_rows import keys_and_values
from mla_router.worker.kernels.kv_cache.paged_rows import paged_rows
from mla_router.worker.kernels.pdl import launch_options
from mla_router.worker.kernels.softcap import softcapped_torch


def gqa_decode(
    q: Tensor,
    cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    schedule: DecodeSchedule,
    out: Tensor,
    *,
    scale: float,
    scales: KVScales = UNSCALED,
    softcap: float | None = None,
    settled: bool = False,
) -> None:
    """Writes softmax(q . keys * scale) . values for each query head over its request's cached tokens to `out`: over the
    last `schedule.window` ones, if it is not None. `softcap` caps the scores (`softcap.py`).

    q [B, H, W], a view is allowed if its last axis is contiguous; out [B, H, V] contiguous, of q's dtype;
    cache [pages, page_size, G * (W + V)], rows of `gqa_rows.py`, with H a multiple of G: query heads
    [i * H / G, (i + 1) * H / G) share KV head i; page_table [all slots, P] int32; slots [B] int64: each request's
    line in page_table; lengths [B] int32: tokens to attend to, at least 1 and at most schedule.max_length; schedule:
    of these lengths. `scales`: of an FP8 cache (`kv_cache/fp8.py`). `settled`: page_table, slots, lengths and schedule
    are (`pdl.py`).

    Scores, weights and sums are float32. On a GPU the weights are rounded to the dtype before the product with values.
    """
    if on_gpu(q):
        gqa_decode_triton(
            q,
            cache,
            page_table,
            slots,
            lengths,
            schedule,
            out,
            scale=scale,
            scales=scales,
            softcap=softcap,
            settled=settled,
        )
    else:
        gqa_decode_torch(
            q,
            cache,
            page_table,
            slots,
            lengths,
            out,
            max_length=schedule.max_length,
            scale=scale,
            scales=scales,
            window=schedule.window,
            softcap=softcap,
        )


def gqa_decode_torch(
    q: Tensor,
    cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    out: Tensor,
    *,
    max_length: int,
    scale: float,
    scales: KVScales = UNSCALED,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """`max_length` is at least the longest length. `window` and `softcap`: as of an `AttentionSpec`. Rows before the
    window are not read."""
    kv_heads = _num_kv_heads(q, cache, slots, lengths, out)
    batch, heads, head_dim = q.shape
    locations, beyond = paged_rows(
        page_table,
        slots,
        lengths,
        page_size=cache.shape[1],
        max_length=max_length,
        window=window,
    )
    rows = kv_take(
        cache,
        locations.flatten(),
        dtype=torch.float32,
        scales=scales,
        value_column=kv_heads * head_dim,
    ).view(*locations.shape, -1)
    keys, values = (  # [B, G, N, W or V]
        part.transpose(1, 2) for part in keys_and_values(rows, head_dim, out.shape[-1])
    )
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim).float()
    scores = softcapped_torch(torch.matmul(grouped, keys.transpose(-1, -2)) * scale, softcap)
    probabilities = scores.masked_fill_(beyond[:, None, None], float("-inf")).softmax(dim=-1)
    out.copy_(torch.matmul(probabilities, values).view(out.shape))


def gqa_decode_triton(
    q: Tensor,
    cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    schedule: DecodeSchedule,
    out: Tensor,
    *,
    scale: float,
    scales: KVScales = UNSCALED,
    softcap: float | None = None,
    settled: bool = False,
    tail: TreeTail | None = None,
) -> None:
    """`tail`: of a tree of each request, whose query rows are `tail.queries`; then `lengths` are of tokens before
    its root (`gqa_tree_decode.py`)."""
    queries = 1 if tail is None else tail.queries
    kv_heads = _num_kv_heads(q[::queries], cache, slots, lengths, out[::queries])
    (rows, heads, head_dim), batch = q.shape, len(slots)
    assert rows == batch * queries, f"q {tuple(q.shape)}, {batch} requests, {queries} queries each"
    fp8 = exponent_bits(cache.dtype)
    pair, v_head_dim = 2 if fp8 else 1, out.shape[-1]
    assert head_dim % pair == v_head_dim % pair == 0, f"heads {head_dim} and {v_head_dim} wide"
    assert (
        q.stride(-1) == page_table.stride(-1) == 1
        and cache.is_contiguous()
        and out.is_contiguous()
        and q.dtype == out.dtype
        and (fp8 or (cache.dtype == q.dtype and scales == UNSCALED))
    ), (
        f"q {q.stride()} {q.dtype}, page table {page_table.stride()}, cache {cache.stride()} "
        f"{cache.dtype}, out {out.stride()} {out.dtype}"
    )
    assert schedule.block_starts.shape == (batch + 1,), (
        f"schedule of {len(schedule.block_starts) - 1} requests, lengths {tuple(lengths.shape)}"
    )
    tiling = schedule.tiling
    row_blocks = triton.cdiv(heads // kv_heads * queries, tiling.block_rows)
    partial_out, partial_lse = partial_results(schedule, out, heads * queries)
    attend_kernel[(schedule.num_parts * kv_heads * row_blocks,)](
        q,
        as_words(cache),
        page_table,
        slots,
        lengths,
        schedule.block_starts,
        schedule.first_requests,
        schedule.part_size,
        out,
        partial_out,
        partial_lse,
        scale * math.log2(math.e) * scales.keys,
        scales.values,
        batch,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        PAGE_SIZE=cache.shape[1],
        BLOCK_ROWS=tiling.block_rows,
        BLOCK_TOKENS=tiling.block_tokens,
        STAGES=tiling.num_stages,
        FP8=fp8,
        WINDOW=schedule.window,
        CAP=None if softcap is None else softcap * math.log2(math.e),
        QUERIES=queries,
        PARTIAL=tail is not None,
        SETTLED=settled,
        **head_blocks(head_dim, v_head_dim, pair=pair),
        num_warps=tiling.num_warps,
        **launch_options(),
    )
    if tail is None:
        merge_parts(partial_out, partial_lse, schedule, out, settled=settled)
        return
    assert softcap is None and schedule.window is None, "trees of other attention"
    among = attend_to_nodes(q, cache, tail, out, kv_heads=kv_heads, scale=scale, scales=scales)
    merge_parts(partial_out, partial_lse, schedule, out, shared=among, settled=settled)


def _num_kv_heads(q: Tensor, cache: Tensor, slots: Tensor, lengths: Tensor, out: Tensor) -> int:
    """Returns G, which follows from the shapes."""
    batch, heads, head_dim = q.shape
    kv_heads, spare = divmod(cache.shape[-1], head_dim + out.shape[-1])
    assert kv_heads and not spare and heads % kv_heads == 0 and out.shape[:2] == (batch, heads), (
        f"q {tuple(q.shape)}, cache {tuple(cache.shape)}, out {tuple(out.shape)}"
    )
    assert slots.shape == lengths.shape == (batch,), (
        f"q {tuple(q.shape)}, slots {tuple(slots.shape)}, lengths {tuple(lengths.shape)}"
    )
    return kv_heads
