"""Decode of absorbed multi-head latent attention: the newest tokens of each request over the paged latent cache.

DeepSeek-V2 (arXiv:2405.04434, section 2.1): with the key up-projection absorbed into the query and
the value up-projection into the output, multi-head latent attention is multi-query attention. Its
single key is the whole cached row (latent and rotary part), and its value is the latent alone.

On a GPU it is split-KV attention (Flash-Decoding, pytorch.org/blog/flash-decoding) over the equal parts of a
`DecodeSchedule`, then a merge of the requests with several parts. Common prefixes of neighbouring requests can be read
once (`shared_prefixes.py`), by one more launch, whose results are merged with the others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from mla_router.worker.kernels.attention.decode_schedule import DecodeSchedule
from mla_router.worker.kernels.attention.decode_tiling import HOPPER_WIDTHS
from mla_router.worker.kernels.attention.fp8_numbers import as_words, exponent_bits
from mla_router.worker.kernels.attention.merge_parts import (
    Parts,
    merge_parts,
    partial_results,
)
from mla_router.worker.kernels.attention.mla_decode_fp8 import attend_fp8_kernel
from mla_router.worker.kernels.attention.mla_decode_hopper import attend_hopper_kernel
from mla_router.worker.kernels.attention.mla_decode_kernel import attend_kernel
from mla_router.worker.kernels.attention.mla_decode_wide import attend_wide_kernel
from mla_router.worker.kernels.attention.mla_tail_kernel import attend_to_latent_nodes
from mla_router.worker.kernels.attention.shared_prefixes import GROUP, SharedPrefixes
from mla_router.worker.kernels.attention.tree_tail import TreeTail
from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.kv_cache.fp8 import KVScales, is_fp8
from mla_router.worker.kernels.kv_cache.gather import kv_take
from mla_router.worker.kernels.kv_cache.paged_rows import paged_rows
from mla_router.worker.kernels.pdl import launch_options

# Requests of one query each for which `mla_decode_hopper.py` copies cached rows before it waits, in 16 bits and in FP8: the
# fastest in whole steps on an H200 (docs/design/kernel_choices.md). With two queries over an FP8 cache registers spill.
EARLY_REQUESTS, EARLY_FP8_REQUESTS = 8, 24


def mla_decode(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    schedule: DecodeSchedule,
    *,
    scale: float,
    queries: int = 1,
    settled: bool = False,
    prefixes: SharedPrefixes | None = None,
    kv_scale: float = 1.0,
) -> Tensor:
    """Returns softmax((q_latent | q_pe) . rows * scale) . latents for each query over its request's rows, [B, H, C] in
    q_latent's dtype.

    q_latent [B, H, C] and q_pe [B, H, R], views are allowed if their last axis is contiguous;
    cache [pages, page_size, C + R]; page_table [all slots, P] int32; slots [B / queries] int64: each request's line in
    page_table; lengths [B / queries] int32: its rows, at least `queries` and at most schedule.max_length; schedule: of
    these lengths, or of the own lengths of `prefixes`, which requires one query a request. `settled`: page_table,
    slots, lengths and schedules are (`pdl.py`). `kv_scale`: of an FP8 cache (`kv_cache/fp8.py`).

    Query b * queries + i belongs to the i-th of the last `queries` tokens of request b, and attends to the rows up to
    that token. Scores, weights and sums are float32. On a GPU the weights are rounded to the dtype before the product
    with latents.
    """
    if not on_gpu(q_latent):
        return mla_decode_torch(
            q_latent,
            q_pe,
            cache,
            page_table,
            slots,
            lengths,
            max_length=schedule.max_length,
            scale=scale,
            queries=queries,
            kv_scale=kv_scale,
        )
    return mla_decode_triton(
        q_latent,
        q_pe,
        cache,
        page_table,
        slots,
        lengths,
        schedule,
        scale=scale,
        queries=queries,
        settled=settled,
        prefixes=prefixes,
        kv_scale=kv_scale,
    )


def mla_decode_torch(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    *,
    max_length: int,
    scale: float,
    queries: int = 1,
    kv_scale: float = 1.0,
) -> Tensor:
    """`max_length` is at least the longest length."""
    _check_shapes(q_latent, q_pe, cache, slots, lengths, queries)
    batch, heads, latent = q_latent.shape
    requests, width = len(lengths), cache.shape[-1]
    locations, beyond = paged_rows(
        page_table, slots, lengths, page_size=cache.shape[1], max_length=max_length
    )
    rows = kv_take(
        cache, locations.flatten(), dtype=torch.float32, scales=KVScales(kv_scale, kv_scale)
    )
    rows = rows.view(requests, max_length, width)

    q = torch.cat((q_latent, q_pe), dim=-1).float().view(requests, queries, heads, width)
    scores = torch.einsum("bqhw,bnw->bqhn", q, rows) * scale
    # Of the new tokens, all but the last attend to fewer rows
    later = torch.arange(queries - 1, -1, -1, dtype=torch.int32, device=lengths.device)
    at = torch.arange(max_length, dtype=torch.int32, device=lengths.device)
    hidden = beyond[:, None] | (at >= (lengths[:, None] - later)[:, :, None])
    weights = scores.masked_fill_(hidden[:, :, None], float("-inf")).softmax(dim=-1)
    out = torch.einsum("bqhn,bnc->bqhc", weights, rows[:, :, :latent])
    return out.reshape(batch, heads, latent).to(q_latent.dtype)


def mla_decode_triton(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    schedule: DecodeSchedule,
    *,
    scale: float,
    queries: int = 1,
    settled: bool = False,
    prefixes: SharedPrefixes | None = None,
    kv_scale: float = 1.0,
    tail: TreeTail | None = None,
) -> Tensor:
    """C and R are powers of 2, at least 16, or 32 with an FP8 cache. `tail`: of a tree of each request, with
    `tail.queries` queries; then `lengths` are of rows before its root (`mla_tree_decode.py`). `settled`:
    `tail.visible` need not be."""
    if tail is not None:
        queries = tail.queries
    _check_shapes(q_latent, q_pe, cache, slots, lengths, queries)
    assert schedule.block_starts.shape == (len(lengths) + 1,), (
        f"schedule of {len(schedule.block_starts) - 1} requests, lengths {tuple(lengths.shape)}"
    )
    assert prefixes is None or queries == 1, f"prefixes of requests with {queries} queries each"
    out = q_latent.new_empty(q_latent.shape)
    operands = _Operands(q_latent, q_pe, cache, page_table, out, scale, kv_scale, settled)
    operands.check()
    shared = None
    if tail is not None:
        own = _attend(operands, schedule, slots, lengths, queries, prefix=True)
        shared = attend_to_latent_nodes(
            q_latent, q_pe, cache, tail, out, scale=scale, kv_scale=kv_scale
        )
    elif prefixes is not None:
        common = prefixes.schedule, prefixes.slots, prefixes.lengths
        shared = _attend(operands, *common, GROUP, prefix=True)
        own = _attend(operands, schedule, slots, prefixes.own_lengths, 1, prefixes.skipped)
    else:
        own = _attend(operands, schedule, slots, lengths, queries)
    merge_parts(*own, out, shared=shared, settled=settled)
    return out


class _Operands(NamedTuple):
    """The arguments of all launches of a call."""

    q_latent: Tensor
    q_pe: Tensor
    cache: Tensor
    page_table: Tensor
    out: Tensor
    scale: float
    kv_scale: float
    settled: bool

    def check(self) -> None:
        """Raises AssertionError for widths, strides and dtypes that the kernels do not take."""
        q_latent, q_pe, cache, page_table = self[:4]
        latent, rope = q_latent.shape[-1], q_pe.shape[-1]
        fp8 = is_fp8(cache.dtype)
        assert min(latent, rope) >= _least_width(cache.dtype) and (
            latent & (latent - 1) == rope & (rope - 1) == 0
        ), f"widths {latent} and {rope}"
        assert q_latent.stride(-1) == q_pe.stride(-1) == page_table.stride(-1) == 1 and (
            cache.is_contiguous()
        ), f"strides {q_latent.stride()}, {q_pe.stride()}, {page_table.stride()}, {cache.stride()}"
        assert fp8 or (cache.dtype == q_latent.dtype and self.kv_scale == 1), (
            f"cache {cache.dtype} with scale {self.kv_scale}, q_latent {q_latent.dtype}"
        )


def _least_width(dtype: torch.dtype) -> int:
    """Returns the fewest numbers of a piece of a row, for a cache of `dtype`: 16 elements of the cache."""
    return 32 if is_fp8(dtype) else 16


def _attend(
    operands: _Operands,
    schedule: DecodeSchedule,
    slots: Tensor,
    lengths: Tensor,
    queries: int,
    skipped: Tensor | None = None,
    *,
    prefix: bool = False,
) -> Parts:
    """Launches the kernel of the schedule's tiling, for requests with `queries` queries each. `skipped`: see `piece_at`.
    `prefix`: all queries of a request see the same rows, and all results are partial."""
    q_latent, q_pe, cache, page_table, out, scale, kv_scale, settled = operands
    (_, heads, latent), rope = q_latent.shape, q_pe.shape[-1]
    tiling, rows = schedule.tiling, heads * queries
    assert not tiling.hopper or (latent, rope) == HOPPER_WIDTHS, (
        f"{tiling}, rows of {latent} and {rope} numbers"
    )
    parts = Parts(*partial_results(schedule, out, rows), schedule)
    arguments = (
        q_latent,
        q_pe,
        cache if tiling.hopper else as_words(cache),
        page_table,
        slots,
        lengths,
        skipped,
        schedule.block_starts,
        schedule.first_requests,
        schedule.part_size,
        out,
        parts.out,
        parts.lse,
        scale * math.log2(math.e) * kv_scale,
        len(lengths),
        q_latent.stride(0),
        q_latent.stride(1),
        q_pe.stride(0),
        q_pe.stride(1),
        page_table.stride(0),
        kv_scale,
    )
    options = {
        "HEADS": heads,
        "QUERIES": queries,
        "LATENT": latent,
        "ROPE": rope,
        "PAGE_SIZE": cache.shape[1],
        "PREFIX": prefix,
        "FP8": exponent_bits(cache.dtype),
        "num_warps": tiling.num_warps,
        **launch_options(),
    }
    grid = (schedule.num_parts * triton.cdiv(rows, tiling.block_rows),)
    if tiling.wide:
        attend_wide_kernel[grid](*arguments, **options, SETTLED=settled)
    elif tiling.in_turns:
        attend_fp8_kernel[grid](
            *arguments, **options, STAGES=tiling.num_stages - 1, SETTLED=settled
        )
    elif tiling.hopper:
        early = EARLY_FP8_REQUESTS if is_fp8(cache.dtype) else EARLY_REQUESTS
        attend_hopper_kernel[grid](
            *arguments,
            **options,
            ROWS=tiling.block_rows,
            TOKENS=tiling.block_tokens,
            STAGES=tiling.num_stages - 1,
            SETTLED=settled,
            EARLY=settled and queries == 1 and len(lengths) <= early,
        )
    else:
        attend_kernel[grid](
            *arguments,
            **options,
            BLOCK_ROWS=tiling.block_rows,
            BLOCK_TOKENS=tiling.block_tokens,
            STAGES=tiling.num_stages,
            PIECES=min(tiling.pieces, latent // _least_width(cache.dtype)),
            # Tiles of 64 rows leave no registers for it
            SETTLED=settled and tiling.block_rows < 64,
        )
    return parts


def _check_shapes(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, lengths: Tensor, queries: int
) -> None:
    batch, heads, latent = q_latent.shape
    assert (
        q_pe.shape[:2] == (batch, heads)
        and cache.shape[-1] == latent + q_pe.shape[-1]
        and slots.shape == lengths.shape == (batch // queries,)
        and batch % queries == 0
    ), (
        f"q_latent {tuple(q_latent.shape)}, q_pe {tuple(q_pe.shape)}, cache {tuple(cache.shape)}, "
        f"slots {tuple(slots.shape)}, lengths {tuple(lengths.shape)}, queries {queries}"
    )
