"""mla_decode against attention over each request's rows alone, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

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
from mla_router.worker.kernels.device import H200
from support.examples import examples
from support.paged_cache import expected_attention, random_cache
from support.sm90 import compile_sm90

LATENT, ROPE, SCALE = 32, 16, 0.3
TILING = Tiling(16, 16, num_warps=4, num_stages=2, programs_per_sm=1)
PIECES = [1, 2, 4]  # 4 become 2, with at least 16 numbers each

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=4)


def check(
    op: Callable[..., Tensor],
    lengths: list[int],
    *,
    heads: int,
    page_size: int,
    queries: int = 1,
    tiling: Tiling = TILING,
    parts: int = 3,
    dtype: torch.dtype = torch.float32,
    settled: bool = False,
    seed: int = 0,
) -> None:
    """Queries are views of a wider projection, rows without an owner are NaN."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [length + queries - 1 for length in lengths]
    paged = random_cache(lengths, page_size, LATENT + ROPE, dtype=dtype, generator=draw)
    q = torch.randn(len(lengths) * queries, heads, LATENT + ROPE + 16, generator=draw).to(dtype)
    q_latent, q_pe, _ = q.split([LATENT, ROPE, 16], dim=-1)
    schedule = decode_schedule(
        paged.lengths, max_length=max(lengths), tiling=tiling, num_parts=parts
    )
    got = op(
        q_latent,
        q_pe,
        paged.cache,
        paged.page_table,
        paged.slots,
        paged.lengths,
        schedule,
        scale=SCALE,
        queries=queries,
        settled=settled,
    )
    expected = expected_attention(q[..., : LATENT + ROPE], paged, LATENT, SCALE, queries)
    assert got.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 3e-3
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@given(
    lengths=LENGTHS,
    heads=st.integers(1, 4),
    page_size=st.sampled_from([1, 4, 16]),
    queries=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_torch(lengths: list[int], heads: int, page_size: int, queries: int, seed: int) -> None:
    check(mla_decode, lengths, heads=heads, page_size=page_size, queries=queries, seed=seed)


@examples(10)
@given(
    lengths=LENGTHS,
    page_size=st.sampled_from([1, 4, 16, 64]),
    parts=st.integers(1, 12),
    pieces=st.sampled_from(PIECES),
    settled=st.booleans(),
    seed=st.integers(0, 100),
)
def test_triton(
    lengths: list[int], page_size: int, parts: int, pieces: int, settled: bool, seed: int
) -> None:
    """Requests have one part, several parts, or share a part; parts may be empty."""
    check(
        mla_decode_triton,
        lengths,
        heads=16,
        page_size=page_size,
        tiling=replace(TILING, pieces=pieces),
        parts=parts,
        settled=settled,
        seed=seed,
    )


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize(("heads", "queries"), [(5, 1), (16, 3), (9, 4), (40, 1)])
def test_triton_rows(heads: int, queries: int, pieces: int) -> None:
    """Fewer and more heads than rows of a tile, new tokens in one tile or two, and parts beyond the rows of the first
    new tokens."""
    check(
        mla_decode_triton,
        [31, 1, 33],
        heads=heads,
        queries=queries,
        page_size=16,
        tiling=replace(TILING, pieces=pieces),
        parts=5,
    )


@pytest.mark.parametrize("pieces", PIECES)
def test_triton_float16(pieces: int) -> None:
    check(
        mla_decode_triton,
        [70, 3, 40],
        heads=16,
        page_size=16,
        tiling=replace(TILING, pieces=pieces),
        parts=5,
        dtype=torch.float16,
    )


@pytest.mark.parametrize("op", [mla_decode, mla_decode_triton])
def test_nan_of_one_request_does_not_reach_another(op: Callable[..., Tensor]) -> None:
    cache = torch.randn(3, 4, LATENT + ROPE)
    cache[2] = float("nan")
    lengths = torch.tensor([4, 3], dtype=torch.int32)
    got = op(
        torch.randn(2, 1, LATENT),
        torch.randn(2, 1, ROPE),
        cache,
        torch.tensor([[1, 2], [2, 0]], dtype=torch.int32),
        torch.tensor([0, 1]),
        lengths,
        decode_schedule(lengths, max_length=4, tiling=TILING, num_parts=1),
        scale=1.0,
    )
    assert got[0].isfinite().all()
    assert got[1].isnan().all()


def test_wrong_shapes_are_named() -> None:
    lengths = torch.tensor([4], dtype=torch.int32)
    with pytest.raises(AssertionError, match=r"q_pe \(1, 1, 4\), cache \(2, 4, 15\)"):
        mla_decode(
            torch.ones(1, 1, 12),
            torch.ones(1, 1, 4),
            torch.ones(2, 4, 15),
            torch.ones(1, 1, dtype=torch.int32),
            torch.tensor([0]),
            lengths,
            decode_schedule(lengths, max_length=4, tiling=TILING, num_parts=1),
            scale=1.0,
        )


# Heads, requests, queries, page size: V2-Lite, V3, and V2-Lite with drafted tokens to verify. Those with 300 requests are for
# the Triton kernel, the others for Hopper's, which copies rows of up to 8 requests early.
REAL = [
    (16, 300, 1, 64),
    (16, 64, 1, 64),
    (16, 64, 1, 16),
    (16, 1, 1, 64),
    (128, 64, 1, 64),
    (16, 64, 2, 64),
    (16, 64, 4, 64),
]


# Their tilings are among those above: what differs is how a page is found.
SMALL_PAGES = [(16, 300, 1, 16), (16, 1, 1, 16)]


def launches() -> None:
    """Launches every tiling of `tiling`, for the 132 multiprocessors of an H200."""
    launch(REAL)


def launches_of_small_pages() -> None:
    launch(SMALL_PAGES)


def launch(shapes: list[tuple[int, int, int, int]]) -> None:
    for (heads, requests, queries, page_size), settled in product(shapes, (False, True)):
        chosen = tiling(heads, requests, queries, on=H200)
        q = torch.empty(requests * queries, heads, 576, dtype=torch.bfloat16, device="meta")
        lengths = torch.empty(requests, dtype=torch.int32, device="meta")
        schedule = decode_schedule_torch(
            lengths, max_length=4096, tiling=chosen, num_parts=132 * chosen.programs_per_sm
        )
        mla_decode_triton(
            *q.split([512, 64], dim=-1),
            torch.empty(100, page_size, 576, dtype=torch.bfloat16, device="meta"),
            torch.empty(64, 4096 // page_size, dtype=torch.int32, device="meta"),
            lengths.long(),
            lengths,
            schedule,
            scale=0.1,
            queries=queries,
            settled=settled,
        )


def test_tiles_by_the_number_of_requests() -> None:
    """A request has a part for each large block, and many requests have large parts."""
    one, some, many = (tiling(16, requests, on=H200) for requests in (1, 240, 241))
    assert (some.block_tokens, some.min_blocks) == (64, 1)
    assert one == some
    assert (many.block_tokens, many.min_blocks) == (32, 2)


def test_many_requests_over_an_fp8_cache_take_blocks_in_turns() -> None:
    turns = {n: tiling(16, n, fp8=True, on=H200).in_turns for n in (1, 24, 25, 128, 129, 300)}
    assert turns == {1: False, 24: False, 25: True, 128: True, 129: False, 300: False}
    assert tiling(8, 64, 2, fp8=True, on=H200).in_turns
    assert not tiling(16, 64, 2, fp8=True, on=H200).in_turns
    assert not tiling(16, 64, on=H200).in_turns


def test_compiled_for_sm_90() -> None:
    check_compiled(launches)


@pytest.mark.slow
def test_small_pages_compiled_for_sm_90() -> None:
    check_compiled(launches_of_small_pages)


def check_compiled(launched: Callable[[], None]) -> None:
    for report in compile_sm90(launched):
        report.check()
        if not report.kernel.startswith("attend"):
            continue
        assert report.reads_ahead == report.constants["SETTLED"], report
        report.check_resident(1 if report.has_wgmma else 2)
        assert report.has_wgmma == (report.kernel != "attend_kernel"), report


def test_hoppers_kernels_are_for_deepseeks_widths() -> None:
    """Gluon has no interpreter: results are tested on a GPU (`tests/gpu/test_mla_decode_cuda.py`)."""
    for rows, requests in ((16, 64), (32, 64), (64, 64), (16, 1)):
        assert not tiling(rows, requests, widths=(256, 64), on=H200).hopper
        assert tiling(rows, requests, on=H200).hopper
        assert tiling(rows, requests, fp8=True, on=H200).hopper
