"""Attention of the nodes of trees against attention over each node's own tokens, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_router.worker.kernels.attention.decode_schedule import (
    decode_schedule,
    decode_schedule_torch,
)
from mla_router.worker.kernels.attention.decode_tiling import Tiling, gqa_tiling
from mla_router.worker.kernels.attention.gqa_decode import gqa_decode_triton
from mla_router.worker.kernels.attention.gqa_tree_decode import gqa_tree_decode_torch
from mla_router.worker.kernels.attention.tree_tail import TreeTail, one_part_each
from mla_router.worker.kernels.device import H200
from mla_router.worker.kernels.kv_cache.fp8 import UNSCALED, KVScales
from support.sm90 import compile_sm90
from support.tree_tails import cached_trees

TILING = Tiling(16, 16, num_warps=4, num_stages=2, programs_per_sm=1)
SCALE, PAGE_SIZE = 0.3, 4


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("triton", "dtype"),
    [(False, torch.float32), (True, torch.float32), (False, FP8), (True, FP8)],
    ids=["torch", "triton", "torch, FP8", "triton, FP8"],
)
@pytest.mark.parametrize(
    ("lengths", "queries", "keys", "kv_heads", "share", "widths", "parts"),
    [
        ([31, 1, 70], 8, 8, 2, 2, (32, 32), 5),  # several parts, one part, and parts of two slots
        (
            [3, 40],
            4,
            12,
            1,
            3,
            (48, 32),
            1,
        ),  # nodes that are expanded, of keys in two powers of two
        ([20], 5, 64, 1, 5, (16, 8), 3),  # all bits; more rows than a tile has
    ],
)
def test_as_each_node_alone(
    lengths: list[int],
    queries: int,
    keys: int,
    kv_heads: int,
    share: int,
    widths: tuple[int, int],
    parts: int,
    triton: bool,
    dtype: torch.dtype,
) -> None:
    head_dim, v_head_dim = widths
    trees = cached_trees(
        lengths,
        queries,
        keys,
        kv_heads * (head_dim + v_head_dim),
        page_size=PAGE_SIZE,
        dtype=dtype,
    )
    tail, count, heads, longest = trees.tail, len(lengths), kv_heads * share, max(lengths)
    scales = KVScales(0.5, 1.5) if dtype == FP8 else UNSCALED
    q = torch.randn(count * queries, heads + 1, head_dim)[:, :heads]
    out = torch.full((count * queries, heads, v_head_dim), float("nan"))
    how: dict[str, Any] = {"scale": SCALE, "scales": scales}
    slots, table = torch.arange(count), trees.page_table
    if triton:
        tail = tail._replace(schedule=one_part_each(count, TILING, q.device))
        schedule = decode_schedule(
            trees.lengths, max_length=longest, tiling=TILING, num_parts=parts
        )
        gqa_decode_triton(
            q, trees.cache, table, slots, trees.lengths, schedule, out, tail=tail, **how
        )
    else:
        slots, of_rows = (x.repeat_interleave(queries) for x in (slots, trees.lengths))
        gqa_tree_decode_torch(
            q, trees.cache, table, slots, of_rows, tail, out, max_length=longest, **how
        )
    tolerance = 3e-3 if triton and dtype == FP8 else 2e-5  # the kernel's products are float16
    for row in range(count * queries):
        tokens = trees.seen(row).double()
        k, v = tokens.tensor_split([kv_heads * head_dim], dim=1)
        k = k.view(-1, kv_heads, head_dim) * scales.keys
        v = v.view(-1, kv_heads, v_head_dim) * scales.values
        for head in range(heads):
            scores = k[:, head // share] @ q[row, head].double() * SCALE
            expected = scores.softmax(0) @ v[:, head // share]
            torch.testing.assert_close(
                out[row, head].double(), expected, rtol=tolerance, atol=tolerance
            )


# Heads, KV heads, head_dim, nodes, keys: Llama 3 8B and 70B, Llama 2; verified and expanded nodes
REAL = [
    (32, 8, 128, 8, 8, torch.bfloat16),
    (32, 8, 128, 4, 16, torch.bfloat16),
    (64, 8, 128, 64, 64, torch.bfloat16),
    (32, 32, 128, 16, 16, torch.bfloat16),
    (32, 8, 128, 8, 8, FP8),
]


def launches() -> None:
    """Launches these shapes with the tiles of `gqa_tiling`, on the 132 multiprocessors of an H200."""
    for heads, kv_heads, head_dim, queries, keys, dtype in REAL:
        chosen = gqa_tiling(heads // kv_heads * queries, 2 * head_dim, fp8=dtype == FP8, on=H200)
        lengths = torch.empty(8, dtype=torch.int32, device="meta")
        schedule = decode_schedule_torch(lengths, max_length=4096, tiling=chosen, num_parts=33)
        rows = 8 * queries
        visible = torch.empty(rows, dtype=torch.int64, device="meta")
        tail = TreeTail(visible, queries, keys, 6400)
        each = one_part_each(8, chosen, lengths.device)
        q = torch.empty(rows, heads + 2 * kv_heads, head_dim, device="meta").bfloat16()
        gqa_decode_triton(
            q[:, :heads],
            torch.empty(128, 64, kv_heads * 2 * head_dim, dtype=dtype, device="meta"),
            torch.empty(64, 64, dtype=torch.int32, device="meta"),
            lengths.long(),
            lengths,
            schedule,
            torch.empty(rows, heads, head_dim, dtype=torch.bfloat16, device="meta"),
            scale=0.1,
            tail=tail._replace(schedule=each),
        )


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
