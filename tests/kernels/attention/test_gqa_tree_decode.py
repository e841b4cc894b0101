"""Attention of the nodes of trees against attention over each node's own tokens, in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.attention.decode_schedule import (
    decode_schedule,
    decode_schedule_torch,
)
from mla_router.worker.kernels.attention.decode_tiling import Tiling, gqa_tiling
from mla_router.worker.kernels.attention.gqa_tree_decode import (
    gqa_tree_decode_torch,
    gqa_tree_decode_triton,
)
from mla_router.worker.kernels.attention.tree_tail import TreeTail, one_part_each
from mla_router.worker.kernels.device import H200
from support.sm90 import compile_sm90

TILING = Tiling(16, 16, num_warps=4, num_stages=2, programs_per_sm=1)
SCALE, PAGE_SIZE = 0.3, 4


def random_tails(slots: int, queries: int, keys: int, draw: random.Random) -> Tensor:
    """Returns the visible keys of the rows of trees: itself and its ancestors. Some rows are idle."""
    rows = []
    for _ in range(slots):
        masks = [1]
        for node in range(1, keys):
            masks.append(masks[draw.randrange(node)] | 1 << node)
        own = masks if queries == keys else draw.sample(masks, queries)
        rows += [0 if draw.random() < 0.2 else mask for mask in own]
    return torch.tensor([row - (1 << 64) if row >> 63 else row for row in rows])


@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize(
    ("lengths", "queries", "keys", "kv_heads", "share", "widths", "parts"),
    [
        ([31, 1, 70], 8, 8, 2, 2, (16, 16), 5),  # several parts, one part, and parts of two slots
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
) -> None:
    """Rows of the cache without an owner, and keys that no row sees, are NaN."""
    draw, generator = random.Random(len(lengths)), torch.Generator().manual_seed(3)
    head_dim, v_head_dim = widths
    count, width = len(lengths), kv_heads * (head_dim + v_head_dim)
    own = [-(-length // PAGE_SIZE) for length in lengths]
    first_row = (1 + sum(own)) * PAGE_SIZE
    cache = torch.full((1 + sum(own) + count * keys, PAGE_SIZE, width), float("nan"))
    flat = cache.flatten(0, 1)
    table, at = torch.zeros(count, max(own), dtype=torch.int32), 1
    visible = random_tails(count, queries, keys, draw)
    for slot, pages in enumerate(own):
        table[slot, :pages] = torch.arange(at, at + pages)
        first = at * PAGE_SIZE
        flat[first : first + lengths[slot]] = torch.randn(lengths[slot], width, generator=generator)
        at += pages
        for key in range(keys):
            if any(mask >> key & 1 for mask in visible[slot * queries :][:queries].tolist()):
                flat[first_row + slot * keys + key] = torch.randn(width, generator=generator)
    heads = kv_heads * share
    q = torch.randn(count * queries, heads + 1, head_dim, generator=generator)[:, :heads]
    out = torch.full((count * queries, heads, v_head_dim), float("nan"))
    tail = TreeTail(visible, queries, keys, first_row)
    of_slots = torch.tensor(lengths, dtype=torch.int32)
    longest = max(lengths)
    if triton:
        tail = tail._replace(schedule=one_part_each(count, TILING, q.device))
        schedule = decode_schedule(of_slots, max_length=longest, tiling=TILING, num_parts=parts)
        slots = torch.arange(count)
        gqa_tree_decode_triton(q, cache, table, slots, of_slots, tail, schedule, out, scale=SCALE)
    else:
        slots = torch.arange(count).repeat_interleave(queries)
        rows = of_slots.repeat_interleave(queries)
        gqa_tree_decode_torch(
            q, cache, table, slots, rows, tail, out, max_length=longest, scale=SCALE
        )
    for row, mask in enumerate(visible.tolist()):
        slot = row // queries
        positions = torch.arange(lengths[slot])
        at_pages = table[slot, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        nodes = [first_row + slot * keys + key for key in range(keys) if mask >> key & 1]
        tokens = torch.cat((flat[at_pages.long()], flat[nodes])).double()
        k = tokens[:, : kv_heads * head_dim].view(-1, kv_heads, head_dim)
        v = tokens[:, kv_heads * head_dim :].view(-1, kv_heads, v_head_dim)
        for head in range(heads):
            scores = k[:, head // share] @ q[row, head].double() * SCALE
            expected = scores.softmax(0) @ v[:, head // share]
            torch.testing.assert_close(out[row, head].double(), expected, rtol=2e-5, atol=2e-5)


# Heads, KV heads, head_dim, nodes, keys: Llama 3 8B and 70B, Llama 2; verified and expanded nodes
REAL = [
    (32, 8, 128, 8, 8),
    (32, 8, 128, 4, 16),
    (64, 8, 128, 64, 64),
    (32, 32, 128, 16, 16),
]


def launches() -> None:
    """Launches these shapes with the tiles of `gqa_tiling`, on the 132 multiprocessors of an H200."""
    for heads, kv_heads, head_dim, queries, keys in REAL:
        chosen = gqa_tiling(heads // kv_heads * queries, 2 * head_dim, on=H200)
        lengths = torch.empty(8, dtype=torch.int32, device="meta")
        schedule = decode_schedule_torch(lengths, max_length=4096, tiling=chosen, num_parts=33)
        rows = 8 * queries
        visible = torch.empty(rows, dtype=torch.int64, device="meta")
        tail = TreeTail(visible, queries, keys, 6400)
        each = one_part_each(8, chosen, lengths.device)
        q = torch.empty(rows, heads + 2 * kv_heads, head_dim, device="meta").bfloat16()
        gqa_tree_decode_triton(
            q[:, :heads],
            torch.empty(128, 64, kv_heads * 2 * head_dim, dtype=torch.bfloat16, device="meta"),
            torch.empty(64, 64, dtype=torch.int32, device="meta"),
            lengths.long(),
            lengths,
            tail._replace(schedule=each),
            schedule,
            torch.empty(rows, heads, head_dim, dtype=torch.bfloat16, device="meta"),
            scale=0.1,
        )


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
