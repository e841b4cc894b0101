"""mla_decode in bfloat16 on a GPU, at the shapes of real models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.engine.attention.layout import StepLayout
from mla_router.worker.engine.attention.triton import TritonBackend
from mla_router.worker.kernels.attention.decode_schedule import (
    DecodeSchedule,
    decode_schedule,
    decode_schedule_torch,
)
from mla_router.worker.kernels.attention.decode_tiling import num_parts, tiling
from mla_router.worker.kernels.attention.mla_decode import mla_decode, mla_decode_triton
from mla_router.worker.kernels.attention.tree_tail import one_part_each
from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.pdl import launch_options, start_next, wait_for_previous
from mla_router.worker.model.config.attention_spec import LatentAttentionSpec
from support.captured_decode import check_captured
from support.cuda import assert_rows_close, captured, forbid_waiting
from support.paged_cache import PagedCache, expected_attention, random_cache
from support.tree_tails import cached_trees

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LATENT, ROPE, SCALE = 512, 64, 0.1147
LENGTHS = [1, 4000, 17, 64, 65, 1, 128, 700, 2048, 33]


def schedule_of(paged: PagedCache, heads: int, queries: int, max_length: int) -> DecodeSchedule:
    chosen = tiling(heads, len(paged.lengths), queries, on=limits(torch.device("cuda")))
    parts = num_parts(chosen, heads, queries, paged.lengths.device)
    return decode_schedule(paged.lengths, max_length=max_length, tiling=chosen, num_parts=parts)


def inputs(
    lengths: list[int], heads: int, queries: int, page_size: int, dtype: torch.dtype
) -> tuple[Tensor, PagedCache]:
    """Queries [B, H, 576], and the cache of requests with so many rows and their new ones."""
    draw = torch.Generator("cuda").manual_seed(len(lengths) + heads)
    paged = random_cache(
        [length + queries - 1 for length in lengths],
        page_size,
        LATENT + ROPE,
        dtype=dtype,
        generator=draw,
        device="cuda",
    )
    shape = len(lengths) * queries, heads, LATENT + ROPE
    return torch.randn(shape, generator=draw, device="cuda").to(dtype), paged


def decode(
    q: Tensor,
    paged: PagedCache,
    schedule: DecodeSchedule,
    queries: int = 1,
    *,
    settled: bool = False,
) -> Tensor:
    return mla_decode(
        *q.split([LATENT, ROPE], dim=-1),
        paged.cache,
        paged.page_table,
        paged.slots,
        paged.lengths,
        schedule,
        scale=SCALE,
        queries=queries,
        settled=settled,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
@pytest.mark.parametrize(("heads", "queries"), [(16, 1), (128, 1), (16, 2), (16, 4), (8, 3)])
def test_float64(heads: int, queries: int, page_size: int, dtype: torch.dtype) -> None:
    """Rows without an owner are NaN."""
    q, paged = inputs(LENGTHS, heads, queries, page_size, dtype)
    schedule = schedule_of(paged, heads, queries, max(LENGTHS) + queries - 1)
    got = decode(q, paged, schedule, queries)
    assert_rows_close(got, expected_attention(q, paged, LATENT, SCALE, queries))


@pytest.mark.parametrize(("heads", "queries"), [(16, 3), (16, 8), (64, 2), (128, 2), (128, 4)])
def test_query_rows(heads: int, queries: int) -> None:
    """48 rows to 512: a tile that is not full, and up to eight tiles."""
    q, paged = inputs(LENGTHS, heads, queries, 16, torch.bfloat16)
    schedule = schedule_of(paged, heads, queries, max(LENGTHS) + queries - 1)
    got = decode(q, paged, schedule, queries)
    assert_rows_close(got, expected_attention(q, paged, LATENT, SCALE, queries))


@pytest.mark.parametrize("parts", [1, 5, 16])
@pytest.mark.parametrize("heads", [16, 8])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_parts_of_several_requests(page_size: int, heads: int, parts: int) -> None:
    """Requests with one part, and with several. Their rows are read before the wait, as in a step."""
    lengths = [1 + 173 * i % 900 for i in range(40)]
    q, paged = inputs(lengths, heads, 1, page_size, torch.bfloat16)
    schedule = decode_schedule(
        paged.lengths,
        max_length=max(lengths),
        tiling=tiling(heads, 40, on=limits(torch.device("cuda"))),
        num_parts=parts,
    )
    torch.zeros(1, device="cuda")  # stands for a step's embedding before its layers (`pdl.py`)
    got = decode(q, paged, schedule, settled=True)
    assert_rows_close(got, expected_attention(q, paged, LATENT, SCALE, 1))


@triton.jit
def _write_late(rows, cache, places, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Writes a row of the cache, long after the next kernel has started."""
    start_next()
    wait_for_previous()
    for _ in range(200):
        tl.inline_asm_elementwise(
            "nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [200], tl.int32, is_pure=False, pack=1
        )
    column = tl.arange(0, BLOCK)
    row = tl.load(rows + tl.program_id(0) * WIDTH + column, column < WIDTH)
    tl.store(cache + tl.load(places + tl.program_id(0)) * WIDTH + column, row, column < WIDTH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[1024], [1], [65], [4000, 64, 130, 3], LENGTHS])
def test_new_rows_are_copied_after_they_are_written(
    lengths: list[int], queries: int, dtype: torch.dtype
) -> None:
    """Rows before them are copied earlier. The new ones are NaN until the kernel before writes them."""
    q, paged = inputs(lengths, 16, queries, 16, torch.bfloat16)
    fp8 = dtype != torch.bfloat16
    if fp8:
        paged = replace(
            paged, cache=paged.cache.to(dtype), rows=[row.to(dtype) for row in paged.rows]
        )
    later = torch.arange(queries, device=CUDA)
    at = paged.lengths[:, None].long() - 1 - later
    pages = paged.page_table[paged.slots[:, None], at // 16].long()
    places = (pages * 16 + at % 16).flatten()
    words = paged.cache.view(torch.uint8).view(-1, paged.cache.shape[-1] * dtype.itemsize)
    rows = words[places].clone()
    words[places] = 255  # NaN in each format
    chosen = tiling(16, len(lengths), queries, fp8=fp8, on=limits(CUDA))
    schedule = decode_schedule(
        paged.lengths,
        max_length=max(lengths) + queries - 1,
        tiling=chosen,
        num_parts=num_parts(chosen, 16, queries, CUDA),
    )
    torch.zeros(1, device=CUDA)  # stands for a step's embedding before its layers (`pdl.py`)
    _write_late[(len(places),)](
        rows,
        words,
        places,
        WIDTH=words.shape[1],
        BLOCK=triton.next_power_of_2(words.shape[1]),
        **launch_options(),
    )
    got = decode(q, paged, schedule, queries, settled=True)
    assert_rows_close(got, expected_attention(q, paged, LATENT, SCALE, queries))


@pytest.mark.parametrize("requests", [1, 300])
def test_batch_sizes(requests: int) -> None:
    lengths = [1 + 37 * i % 600 for i in range(requests)]
    q, paged = inputs(lengths, 16, 1, 64, torch.bfloat16)
    got = decode(q, paged, schedule_of(paged, 16, 1, max(lengths)))
    assert_rows_close(got, expected_attention(q, paged, LATENT, SCALE, 1))


def test_float32_takes_the_torch_way() -> None:
    q, paged = inputs(LENGTHS, 16, 2, 16, torch.float32)
    schedule = schedule_of(paged, 16, 2, max(LENGTHS) + 1)
    with forbid_waiting():
        got = decode(q, paged, schedule, 2)
    expected = expected_attention(q, paged, LATENT, SCALE, 2)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("requests", [1, 130, 700])
def test_schedule(requests: int) -> None:
    lengths = (torch.arange(requests, device="cuda") * 7919 % 5000 + 1).int()
    for parts in (1, 132, 264, 528):
        got, expected = (
            make(
                lengths,
                max_length=5000,
                tiling=tiling(16, requests, on=limits(torch.device("cuda"))),
                num_parts=parts,
            )
            for make in (decode_schedule, decode_schedule_torch)
        )
        assert torch.equal(got.block_starts, expected.block_starts)
        assert torch.equal(got.first_requests, expected.first_requests)
        assert torch.equal(got.part_size, expected.part_size)


@pytest.mark.parametrize(("heads", "queries"), [(16, 1), (128, 1), (16, 2), (16, 4), (128, 2)])
def test_graph_follows_the_lengths(heads: int, queries: int) -> None:
    """The requests of padding have fewer rows than queries."""
    q, paged = inputs(LENGTHS, heads, queries, 64, torch.bfloat16)
    longest = max(LENGTHS) + queries - 1

    def rows_of(attended: Tensor) -> Tensor:
        return attended.view(-1, queries * heads, LATENT)

    check_captured(
        paged,
        lambda: rows_of(decode(q, paged, schedule_of(paged, heads, queries, longest), queries)),
        lambda few: rows_of(
            expected_attention(q[: queries * len(few.rows)], few, LATENT, SCALE, queries)
        ),
    )


@pytest.mark.parametrize("queries", [1, 2, 4])
def test_rows_of_a_slot_in_a_step(queries: int) -> None:
    """The backend reads the cache once for all rows of a slot, in a graph that was captured with rows of padding."""
    q, paged = inputs(LENGTHS, 16, queries, 64, torch.bfloat16)
    spec = LatentAttentionSpec(
        num_heads=16,
        scale=SCALE,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=128,
        qk_rope_head_dim=ROPE,
        v_head_dim=128,
    )
    backend = TritonBackend(spec, CUDA, torch.bfloat16, torch.bfloat16)
    slots = torch.full((len(q),), paged.idle_slot(), device=CUDA)
    lengths = torch.ones_like(slots, dtype=torch.int32)
    paged.cache[0] = 0
    longest = int(paged.lengths.max())
    layout = StepLayout(paged.page_table, 64, slots, lengths, longest, queries_per_slot=queries)

    def step() -> Tensor:
        attention = backend.plan(layout)
        torch.zeros(1, device=CUDA)  # stands for a step's embedding before its layers (`pdl.py`)
        return attention.mla_decode(*q.split([LATENT, ROPE], dim=-1), paged.cache)

    replay, out = captured(step)
    assert out.isfinite().all()
    slots.copy_(paged.slots.repeat_interleave(queries))
    later = torch.arange(queries - 1, -1, -1, dtype=torch.int32, device=CUDA)
    lengths.copy_((paged.lengths[:, None] - later).flatten())
    replay()
    assert_rows_close(out, expected_attention(q, paged, LATENT, SCALE, queries))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("heads", "queries", "keys"), [(16, 8, 8), (16, 2, 16), (16, 4, 8), (128, 8, 8), (16, 16, 64)]
)
def test_trees(heads: int, queries: int, keys: int, dtype: torch.dtype) -> None:
    """Each node attends to the tokens in front of its tree, and to its ancestors. Rows without an owner are NaN."""
    fp8 = dtype != torch.bfloat16
    trees = cached_trees(
        LENGTHS, queries, keys, LATENT + ROPE, page_size=16, dtype=dtype, device="cuda"
    )
    count, kv_scale = len(LENGTHS), 0.5 if fp8 else 1.0
    chosen = tiling(heads, count, queries, fp8=fp8, on=limits(CUDA))
    schedule = decode_schedule(
        trees.lengths,
        max_length=max(LENGTHS),
        tiling=chosen,
        num_parts=num_parts(chosen, heads, queries, CUDA),
    )
    q = torch.randn(count * queries, heads, LATENT + ROPE, device="cuda").bfloat16()
    torch.zeros(1, device="cuda")  # stands for a step's embedding before its layers (`pdl.py`)
    got = mla_decode_triton(
        *q.split([LATENT, ROPE], dim=-1),
        trees.cache,
        trees.page_table,
        torch.arange(count, device="cuda"),
        trees.lengths,
        schedule,
        scale=SCALE,
        settled=True,
        kv_scale=kv_scale,
        tail=trees.tail._replace(schedule=one_part_each(count, chosen, CUDA)),
    )
    expected = torch.empty(got.shape, dtype=torch.float64, device="cuda")
    for row in range(count * queries):
        tokens = trees.seen(row).double() * kv_scale
        weights = (q[row].double() @ tokens.T * SCALE).softmax(dim=-1)
        expected[row] = weights @ tokens[:, :LATENT]
    assert_rows_close(got, expected)
