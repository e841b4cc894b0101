"""gqa_decode against attention of each head over its request's tokens alone, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.kernels.attention.decode_schedule import (
    decode_schedule,
    decode_schedule_torch,
)
from mla_router.worker.kernels.attention.decode_tiling import MANY_KV_HEADS, Tiling, gqa_tiling
from mla_router.worker.kernels.attention.gqa_decode import gqa_decode, gqa_decode_triton
from mla_router.worker.kernels.device import H200
from support.corners import corners
from support.examples import examples
from support.paged_cache import expected_gqa, forget_rows_before, random_cache
from support.sm90 import compile_sm90

SCALE = 0.3
TILING = Tiling(16, 16, num_warps=4, num_stages=2, programs_per_sm=1)


def check(
    op: Callable[..., None],
    lengths: list[int],
    *,
    kv_heads: int,
    share: int,
    head_dim: int = 16,
    v_head_dim: int = 16,
    page_size: int = 16,
    parts: int = 3,
    spare: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> None:
    """Queries are views of a wider projection, rows without an owner and before a window are NaN, unused entries of
    page tables 0."""
    draw = torch.Generator().manual_seed(seed)
    row = kv_heads * (head_dim + v_head_dim)
    paged = random_cache(lengths, page_size, row, dtype=dtype, generator=draw)
    joined = torch.randn(len(lengths), kv_heads * share + 2, head_dim, generator=draw).to(dtype)
    q = joined[:, : kv_heads * share]
    # The last page of the longest request may be partly empty
    capacity = paged.page_table.shape[1] * page_size
    schedule = decode_schedule(
        paged.lengths,
        max_length=min(max(lengths) + spare, capacity),
        tiling=TILING,
        num_parts=parts,
        window=window,
    )
    out = torch.full((len(lengths), kv_heads * share, v_head_dim), float("nan"), dtype=dtype)
    expected = expected_gqa(q, paged, kv_heads, v_head_dim, SCALE, window=window, softcap=softcap)
    if window is not None:
        forget_rows_before(paged, window)
    tables = paged.page_table, paged.slots, paged.lengths
    op(q, paged.cache, *tables, schedule, out, scale=SCALE, softcap=softcap)
    tolerance = 2e-5 if dtype == torch.float32 else 3e-3
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=4)
WINDOWS = st.none() | st.integers(1, 80)
CAPS = st.sampled_from([None, 0.5, 30.0])


@given(
    lengths=LENGTHS,
    kv_heads=st.integers(1, 3),
    share=st.integers(1, 3),
    widths=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    page_size=st.sampled_from([1, 4, 16]),
    spare=st.integers(0, 20),
    window=WINDOWS,
    softcap=CAPS,
    seed=st.integers(0, 100),
)
def test_torch(
    lengths: list[int],
    kv_heads: int,
    share: int,
    widths: tuple[int, int],
    page_size: int,
    spare: int,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    head_dim, v_head_dim = widths
    check(
        gqa_decode,
        lengths,
        kv_heads=kv_heads,
        share=share,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        page_size=page_size,
        spare=spare,
        window=window,
        softcap=softcap,
        seed=seed,
    )


@examples(10)
@given(
    lengths=LENGTHS,
    kv_heads=st.integers(1, 3),
    share=st.integers(1, 4),
    page_size=st.sampled_from([1, 4, 16, 64]),
    parts=st.integers(1, 12),
    window=WINDOWS,
    softcap=CAPS,
    seed=st.integers(0, 100),
)
def test_triton(
    lengths: list[int],
    kv_heads: int,
    share: int,
    page_size: int,
    parts: int,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    """Requests have one part, several parts, or share a part; parts may be empty."""
    check(
        gqa_decode_triton,
        lengths,
        kv_heads=kv_heads,
        share=share,
        page_size=page_size,
        parts=parts,
        window=window,
        softcap=softcap,
        seed=seed,
    )


@pytest.mark.parametrize(("window", "page_size"), corners([1, 15, 16, 17, 32, 33, 70], [4, 16]))
def test_triton_at_the_border_of_a_window(window: int, page_size: int) -> None:
    """Blocks have 16 rows: windows end within blocks, between them, and before the first row."""
    lengths = [window, window + 1, 15, 16, 17, 48, 70]
    check(
        gqa_decode_triton,
        lengths,
        kv_heads=2,
        share=2,
        page_size=page_size,
        window=window,
        parts=5,
    )


@pytest.mark.parametrize(
    ("kv_heads", "share", "head_dim", "v_head_dim"),
    [
        (2, 1, 48, 32),  # multi-head, keys of two powers of two
        (1, 20, 16, 16),  # more query heads than a tile has rows
        (2, 2, 8, 6),  # smaller than Triton's products
        (2, 3, 40, 24),  # no powers of two, and neither is the rest of the keys
        (1, 2, 34, 33),
    ],
)
def test_triton_widths(kv_heads: int, share: int, head_dim: int, v_head_dim: int) -> None:
    check(
        gqa_decode_triton,
        [31, 1, 33],
        kv_heads=kv_heads,
        share=share,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        parts=5,
    )


def test_triton_float16() -> None:
    check(
        gqa_decode_triton,
        [70, 3, 40],
        kv_heads=2,
        share=4,
        head_dim=48,
        v_head_dim=32,
        parts=5,
        window=33,
        softcap=2.0,
        dtype=torch.float16,
    )


def test_triton_of_a_wide_head() -> None:
    """Gemma 2's."""
    check(gqa_decode_triton, [70, 3], kv_heads=1, share=2, head_dim=256, v_head_dim=256, window=40)


@pytest.mark.parametrize("op", [gqa_decode, gqa_decode_triton])
def test_nan_of_one_request_does_not_reach_another(op: Callable[..., None]) -> None:
    cache = torch.randn(3, 4, 32)
    cache[2] = float("nan")
    lengths = torch.tensor([4, 3], dtype=torch.int32)
    out = torch.empty(2, 2, 16)
    op(
        torch.randn(2, 2, 16),
        cache,
        torch.tensor([[1, 2], [2, 0]], dtype=torch.int32),
        torch.tensor([0, 1]),
        lengths,
        decode_schedule(lengths, max_length=4, tiling=TILING, num_parts=1),
        out,
        scale=1.0,
    )
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 24), (2, 25)], ids=["heads", "head_dim"])
def test_wrong_shapes_are_named(heads: int, head_dim: int) -> None:
    lengths = torch.tensor([4], dtype=torch.int32)
    named = rf"q \(1, {heads}, 6\), cache \(2, 4, {head_dim}\), out \(1, {heads}, 6\)"
    with pytest.raises(AssertionError, match=named):
        gqa_decode(
            torch.ones(1, heads, 6),
            torch.ones(2, 4, head_dim),
            torch.ones(1, 1, dtype=torch.int32),
            torch.tensor([0]),
            lengths,
            decode_schedule(lengths, max_length=4, tiling=TILING, num_parts=1),
            torch.empty(1, heads, 6),
            scale=1.0,
        )


# Heads, KV heads, key and value head_dim, page size: Llama 3 8B and 70B, Llama 3.2 1B and 3B, Llama 2,
# V2-Lite and V3 without absorption, and Gemma 2 9B and 27B, which have windows and soft caps
REAL = [
    (32, 8, 128, 128, 64),
    (32, 8, 128, 128, 16),
    (64, 8, 128, 128, 64),
    (32, 8, 64, 64, 64),
    (24, 8, 128, 128, 16),
    (32, 32, 128, 128, 16),
    (32, 1, 128, 128, 64),
    (16, 16, 192, 128, 64),
    (128, 128, 192, 128, 16),
    (16, 8, 256, 256, 64),
    (16, 8, 256, 256, 16),
    (32, 16, 128, 128, 64),
]
GEMMA = REAL[-3:]


def tiling_of(heads: int, kv_heads: int, width: int) -> Tiling:
    return gqa_tiling(heads // kv_heads, width, num_kv_heads=kv_heads, on=H200)


def launches() -> None:
    """Launches every tiling of `gqa_tiling` for these shapes, on the 132 multiprocessors of an H200."""
    for shape in REAL:
        heads, kv_heads, head_dim, v_head_dim, page_size = shape
        options = [(None, None)] if shape not in GEMMA else [(4096, 50.0), (None, 50.0)]
        chosen = tiling_of(heads, kv_heads, head_dim + v_head_dim)
        lengths = torch.empty(8, dtype=torch.int32, device="meta")
        parts = max(132 * chosen.programs_per_sm // kv_heads, 1)
        joined = torch.empty(
            8, (heads + 2 * kv_heads) * head_dim, dtype=torch.bfloat16, device="meta"
        )
        row = kv_heads * (head_dim + v_head_dim)
        for window, softcap in options:
            schedule = decode_schedule_torch(
                lengths, max_length=4096, tiling=chosen, num_parts=parts, window=window
            )
            gqa_decode_triton(
                joined[:, : heads * head_dim].view(8, heads, head_dim),
                torch.empty(100, page_size, row, dtype=torch.bfloat16, device="meta"),
                torch.empty(64, 4096 // page_size, dtype=torch.int32, device="meta"),
                lengths.long(),
                lengths,
                schedule,
                torch.empty(8, heads, v_head_dim, dtype=torch.bfloat16, device="meta"),
                scale=0.1,
                softcap=softcap,
            )


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
        if report.kernel != "attend_kernel":
            continue
        sizes = report.constants
        chosen = tiling_of(sizes["HEADS"], sizes["KV_HEADS"], sizes["W"] + sizes["V"])
        fitting = chosen.programs_per_sm
        if sizes["W"] == 128 and sizes["KV_HEADS"] >= MANY_KV_HEADS and fitting == 4:
            fitting = 3  # measured as faster with one more than fit
        report.check_resident(fitting)
