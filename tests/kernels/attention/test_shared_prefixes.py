"""Shared-prefix batching: common rows of neighbouring requests are found page by page, and read once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_router.worker.kernels.attention.decode_schedule import (
    decode_schedule,
    decode_schedule_torch,
)
from mla_router.worker.kernels.attention.decode_tiling import Tiling, tiling
from mla_router.worker.kernels.attention.mla_decode import mla_decode, mla_decode_triton
from mla_router.worker.kernels.attention.shared_prefixes import (
    GROUP,
    SharedPrefixes,
    find_torch,
    find_triton,
    shared_prefixes,
)
from mla_router.worker.kernels.device import H200
from support.examples import examples
from support.paged_cache import PagedCache, expected_attention, random_cache
from support.sm90 import compile_sm90

LATENT, ROPE, SCALE, HEADS = 32, 16, 0.3, 2
TILING = Tiling(16, 16, num_warps=4, num_stages=2, programs_per_sm=1)

# For each run of requests: their lengths, and the number of common pages
RUNS = st.lists(
    st.tuples(st.lists(st.integers(1, 90), min_size=1, max_size=9), st.integers(0, 6)),
    min_size=1,
    max_size=3,
)


def in_runs(runs: list[tuple[list[int], int]], page_size: int, seed: int) -> PagedCache:
    lengths = [length for run, _ in runs for length in run]
    draw = torch.Generator().manual_seed(seed)
    paged = random_cache(lengths, page_size, LATENT + ROPE, dtype=torch.float32, generator=draw)
    start = 0
    for run, pages in runs:
        paged.share(range(start, start + len(run)), min(pages, min(run) // page_size))
        start += len(run)
    return paged


@pytest.mark.parametrize("find", [find_torch, find_triton])
@examples(30)
@given(
    runs=RUNS,
    page_size=st.sampled_from([1, 4, 16]),
    at_least=st.sampled_from([1, 20]),
    seed=st.integers(0, 100),
)
def test_found(
    find: Callable[..., Tensor],
    runs: list[tuple[list[int], int]],
    page_size: int,
    at_least: int,
    seed: int,
) -> None:
    paged = in_runs(runs, page_size, seed)
    tables = paged.page_table[paged.slots].tolist()
    expected = []
    for first in range(0, len(tables) - GROUP + 1, GROUP):
        group = range(first, first + GROUP)
        # Each request keeps its newest row
        whole = min((len(paged.rows[r]) - 1) // page_size for r in group)
        columns = zip(*[tables[r][:whole] for r in group], strict=True)
        same = len(list(takewhile(lambda pages: len(set(pages)) == 1, columns)))
        expected.append(same if same * page_size >= at_least else 0)
    got = find(paged.page_table, paged.slots, paged.lengths, page_size=page_size, at_least=at_least)
    assert got.tolist() == expected


def test_more_pages_than_are_read_at_once() -> None:
    table = torch.arange(4 * 1000, dtype=torch.int32).view(4, 1000)
    table[1:] = table[0]
    table[2, 700] = 0
    slots, lengths = torch.arange(4), torch.full((4,), 1000, dtype=torch.int32)
    for last, same in ((4, 700), (2, 999)):  # with slots 0 and 1 alone, all but the newest row
        few = slots[:last].repeat(4 // last)
        assert find_triton(table, few, lengths, page_size=1, at_least=1).tolist() == [same]


def found(paged: PagedCache, parts: int) -> SharedPrefixes:
    return shared_prefixes(
        paged.page_table,
        paged.slots,
        paged.lengths,
        page_size=paged.cache.shape[1],
        max_length=90,
        tiling=TILING,
        num_parts=parts,
        worth_it=(1, 1),
    )


@pytest.mark.parametrize("op", [mla_decode, mla_decode_triton])
@examples(15)
@given(
    runs=RUNS,
    page_size=st.sampled_from([4, 16]),
    parts=st.integers(1, 12),
    pieces=st.sampled_from([1, 2]),
    seed=st.integers(0, 100),
)
def test_decode(
    op: Callable[..., Tensor],
    runs: list[tuple[list[int], int]],
    page_size: int,
    parts: int,
    pieces: int,
    seed: int,
) -> None:
    """The result is the same as if each request read all of its rows."""
    paged = in_runs(runs, page_size, seed)
    q = torch.randn(len(paged.rows), HEADS, LATENT + ROPE)
    prefixes = found(paged, parts)
    schedule = decode_schedule(
        prefixes.own_lengths,
        max_length=int(paged.lengths.max()),
        tiling=replace(TILING, pieces=pieces),
        num_parts=parts,
    )
    got = op(
        *q.split([LATENT, ROPE], dim=-1),
        paged.cache,
        paged.page_table,
        paged.slots,
        paged.lengths,
        schedule,
        scale=SCALE,
        settled=True,
        prefixes=prefixes,
    )
    expected = expected_attention(q, paged, LATENT, SCALE, queries=1)
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)


def test_little_in_common_is_not_worth_it() -> None:
    paged = in_runs([([90] * 8, 20)], 4, seed=0)
    for total, lengths in ((160, [80, 80]), (161, [0, 0])):
        prefixes = shared_prefixes(
            paged.page_table,
            paged.slots,
            paged.lengths,
            page_size=4,
            max_length=90,
            tiling=TILING,
            num_parts=3,
            worth_it=(1, total),
        )
        assert prefixes.lengths.tolist() == lengths
        assert prefixes.own_lengths.tolist() == [90 - lengths[0]] * 8
        assert prefixes.skipped.tolist() == [lengths[0] // 4] * 8


def launches() -> None:
    """Launches V2-Lite's tilings, for the 132 multiprocessors of an H200."""
    requests, heads, page_size = 512, 16, 16
    chosen, shared = tiling(heads, requests, on=H200), tiling(heads, requests, GROUP, on=H200)
    lengths = torch.empty(requests, dtype=torch.int32, device="meta")
    table = torch.empty(requests, 256, dtype=torch.int32, device="meta")
    common = find_triton(table, lengths.long(), lengths, page_size=page_size, at_least=512)
    schedule = decode_schedule_torch(common, max_length=4096, tiling=shared, num_parts=132)
    q = torch.empty(requests, heads, 576, dtype=torch.bfloat16, device="meta")
    mla_decode_triton(
        *q.split([512, 64], dim=-1),
        torch.empty(100, page_size, 576, dtype=torch.bfloat16, device="meta"),
        table,
        lengths.long(),
        lengths,
        decode_schedule_torch(lengths, max_length=4096, tiling=chosen, num_parts=264),
        scale=0.1,
        settled=True,
        prefixes=SharedPrefixes(common, common.long(), lengths, lengths, schedule),
    )


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check_order()
        # Tiles of 64 rows keep addresses on the stack, as in `test_mla_decode.py`
        assert report.spill_bytes <= (128 if report.has_wgmma else 0), report
