"""Latent attention of the nodes of trees against attention over each node's own tokens, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_router.worker.kernels.attention.decode_schedule import (
    decode_schedule,
    decode_schedule_torch,
)
from mla_router.worker.kernels.attention.decode_tiling import Tiling, tiling
from mla_router.worker.kernels.attention.mla_decode import mla_decode_triton
from mla_router.worker.kernels.attention.mla_tree_decode import mla_tree_decode_torch
from mla_router.worker.kernels.attention.tree_tail import TreeTail, one_part_each
from mla_router.worker.kernels.device import H200
from support.sm90 import compile_sm90
from support.tree_tails import cached_trees

TILING = Tiling(16, 16, num_warps=4, num_stages=2, programs_per_sm=1)
SCALE, PAGE_SIZE, ROPE = 0.3, 4, 32
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("triton", "dtype"),
    [(False, torch.float32), (True, torch.float32), (False, FP8), (True, FP8)],
    ids=["torch", "triton", "torch, FP8", "triton, FP8"],
)
@pytest.mark.parametrize(
    ("lengths", "queries", "keys", "heads", "latent", "parts"),
    [
        ([31, 1, 70], 8, 8, 4, 32, 5),  # several parts, one part, and parts of two slots
        ([3, 40], 4, 12, 3, 256, 1),  # nodes that are expanded, latents in two pieces
        ([20], 5, 64, 16, 32, 3),  # all bits; more rows than a tile has
    ],
)
def test_as_each_node_alone(
    lengths: list[int],
    queries: int,
    keys: int,
    heads: int,
    latent: int,
    parts: int,
    triton: bool,
    dtype: torch.dtype,
) -> None:
    trees = cached_trees(lengths, queries, keys, latent + ROPE, page_size=PAGE_SIZE, dtype=dtype)
    tail, count, longest = trees.tail, len(lengths), max(lengths)
    kv_scale = 0.5 if dtype == FP8 else 1.0
    q = torch.randn(count * queries, heads, latent + ROPE + 16)
    q_latent, q_pe, _ = q.split([latent, ROPE, 16], dim=-1)
    how: dict[str, Any] = {"scale": SCALE, "kv_scale": kv_scale}
    slots, of_slots, table = torch.arange(count), trees.lengths, trees.page_table
    if triton:
        tail = tail._replace(schedule=one_part_each(count, TILING, q.device))
        schedule = decode_schedule(of_slots, max_length=longest, tiling=TILING, num_parts=parts)
        got = mla_decode_triton(
            q_latent, q_pe, trees.cache, table, slots, of_slots, schedule, tail=tail, **how
        )
    else:
        slots, of_rows = (x.repeat_interleave(queries) for x in (slots, of_slots))
        got = mla_tree_decode_torch(
            q_latent, q_pe, trees.cache, table, slots, of_rows, tail, max_length=longest, **how
        )
    tolerance = 3e-3 if triton and dtype == FP8 else 2e-5  # the kernel's products are float16
    for row in range(count * queries):
        tokens = trees.seen(row).double() * kv_scale
        scores = q[row, :, : latent + ROPE].double() @ tokens.T * SCALE
        expected = scores.softmax(dim=-1) @ tokens[:, :latent]
        torch.testing.assert_close(got[row].double(), expected, rtol=tolerance, atol=tolerance)


BF16 = torch.bfloat16
# Heads, nodes, keys: V2-Lite's verified nodes, expanded ones, and all that a mask can have
REAL = [(16, 8, 8, BF16), (16, 2, 16, BF16), (16, 8, 64, FP8)]


def launches() -> None:
    """Launches these shapes with the tiles of `tiling`, on the 132 multiprocessors of an H200."""
    for heads, queries, keys, dtype in REAL:
        chosen = tiling(heads, 8, queries, fp8=dtype == FP8, on=H200)
        lengths = torch.empty(8, dtype=torch.int32, device="meta")
        schedule = decode_schedule_torch(lengths, max_length=4096, tiling=chosen, num_parts=132)
        rows = 8 * queries
        visible = torch.empty(rows, dtype=torch.int64, device="meta")
        tail = TreeTail(visible, queries, keys, 6400, one_part_each(8, chosen, visible.device))
        q = torch.empty(rows, heads, 576, dtype=BF16, device="meta")
        mla_decode_triton(
            *q.split([512, 64], dim=-1),
            torch.empty(128, 64, 576, dtype=dtype, device="meta"),
            torch.empty(64, 64, dtype=torch.int32, device="meta"),
            lengths.long(),
            lengths,
            schedule,
            scale=0.1,
            settled=True,
            tail=tail,
        )


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
