"""Decode attention over FP8 caches against attention over the dequantized rows, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.attention.decode_schedule import (
    decode_schedule,
    decode_schedule_torch,
)
from mla_router.worker.kernels.attention.decode_tiling import (
    Tiling,
    gqa_tiling,
    num_parts,
    tiling,
)
from mla_router.worker.kernels.attention.gqa_decode import gqa_decode, gqa_decode_triton
from mla_router.worker.kernels.attention.mla_decode import mla_decode, mla_decode_triton
from mla_router.worker.kernels.attention.shared_prefixes import shared_prefixes
from mla_router.worker.kernels.device import H200, limits
from mla_router.worker.kernels.kv_cache.fp8 import FORMATS, KVScales
from support.architectures import LIMITS, compiling_for
from support.paged_cache import dequantized, expected_attention, expected_gqa, random_cache
from support.sm90 import Report, compile_sm90

LATENT, ROPE, SCALE, KV_SCALE = 64, 32, 0.3, 0.7
TILING = Tiling(16, 16, num_warps=4, num_stages=2, programs_per_sm=1)
DTYPES = list(FORMATS.values())


def check_mla(
    op: Callable[..., Tensor],
    dtype: torch.dtype,
    *,
    heads: int = 16,
    queries: int = 1,
    page_size: int = 16,
    tiling: Tiling = TILING,
    shared: int = 0,
) -> None:
    """Rows without an owner are NaN. `shared`: pages that all requests have in common."""
    draw = torch.Generator().manual_seed(heads)
    lengths = [70, 31, 33, 64, 40]
    paged = random_cache(lengths, page_size, LATENT + ROPE, dtype=dtype, generator=draw)
    paged.share(range(len(lengths)), shared)
    q = torch.randn(len(lengths) * queries, heads, LATENT + ROPE, generator=draw)
    prefixes = None
    if shared:
        prefixes = shared_prefixes(
            paged.page_table,
            paged.slots,
            paged.lengths,
            page_size=page_size,
            max_length=70,
            tiling=replace(tiling, block_rows=64),
            num_parts=3,
            worth_it=(1, 1),
        )
        assert prefixes.lengths.tolist() == [shared * page_size]
    schedule = decode_schedule(
        prefixes.own_lengths if prefixes else paged.lengths,
        max_length=70,
        tiling=tiling,
        num_parts=5,
    )
    got = op(
        *q.split([LATENT, ROPE], dim=-1),
        paged.cache,
        paged.page_table,
        paged.slots,
        paged.lengths,
        schedule,
        scale=SCALE,
        queries=queries,
        prefixes=prefixes,
        kv_scale=KV_SCALE,
    )
    expected = expected_attention(q.double(), dequantized(paged, KV_SCALE), LATENT, SCALE, queries)
    # The kernel multiplies in float16
    tolerance = 2e-5 if op is mla_decode else 4e-3
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch(dtype: torch.dtype) -> None:
    check_mla(mla_decode, dtype, queries=2)


@pytest.mark.parametrize(
    ("heads", "queries", "pieces", "page_size"), [(16, 1, 2, 16), (5, 1, 1, 1), (9, 3, 4, 16)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton(dtype: torch.dtype, heads: int, queries: int, pieces: int, page_size: int) -> None:
    chosen = replace(TILING, pieces=pieces)
    check_mla(
        mla_decode_triton, dtype, heads=heads, queries=queries, tiling=chosen, page_size=page_size
    )


def test_common_prefixes() -> None:
    check_mla(mla_decode_triton, torch.float8_e4m3fn, shared=1)


# Query heads to a KV head, head_dim of keys and values: the last do not fill their blocks
WIDTHS = [(4, 32, 32), (1, 64, 32), (3, 40, 24)]


@pytest.mark.parametrize(("share", "head_dim", "v_head_dim"), WIDTHS)
@pytest.mark.parametrize("op", [gqa_decode, gqa_decode_triton])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_queries(
    dtype: torch.dtype, op: Callable[..., None], share: int, head_dim: int, v_head_dim: int
) -> None:
    draw = torch.Generator().manual_seed(share)
    kv_heads, lengths = 2, [70, 1, 33]
    row = kv_heads * (head_dim + v_head_dim)
    paged = random_cache(lengths, 16, row, dtype=dtype, generator=draw)
    q = torch.randn(3, kv_heads * share, head_dim, generator=draw)
    out = torch.full((3, kv_heads * share, v_head_dim), float("nan"))
    schedule = decode_schedule(paged.lengths, max_length=70, tiling=TILING, num_parts=4)
    scales = KVScales(0.7, 1.9)
    op(
        q,
        paged.cache,
        paged.page_table,
        paged.slots,
        paged.lengths,
        schedule,
        out,
        scale=SCALE,
        scales=scales,
    )
    read = dequantized(paged, *scales, kv_heads * head_dim)
    expected = expected_gqa(q.double(), read, kv_heads, v_head_dim, SCALE)
    tolerance = 2e-5 if op is gqa_decode else 5e-3
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_large_queries_stay_finite() -> None:
    """Float16 ends at 65,504, bfloat16 does not."""
    paged = random_cache([4], 16, 96, dtype=DTYPES[0], generator=torch.Generator().manual_seed(0))
    schedule = decode_schedule(paged.lengths, max_length=4, tiling=TILING, num_parts=1)
    q = torch.full((1, 16, 96), 1e6)
    place = paged.cache, paged.page_table, paged.slots, paged.lengths, schedule
    got = mla_decode_triton(*q.split([64, 32], dim=-1), *place, scale=SCALE)
    assert got.isfinite().all()


def test_scales_belong_to_fp8_caches() -> None:
    paged = random_cache(
        [4], 16, 96, dtype=torch.float32, generator=torch.Generator().manual_seed(0)
    )
    schedule = decode_schedule(paged.lengths, max_length=4, tiling=TILING, num_parts=1)
    q = torch.ones(1, 16, 96)
    place = paged.cache, paged.page_table, paged.slots, paged.lengths, schedule
    with pytest.raises(AssertionError, match="with scale 2"):
        mla_decode_triton(*q.split([64, 32], dim=-1), *place, scale=SCALE, kv_scale=2.0)


META = torch.device("meta")


def launch_mla(dtype: torch.dtype, heads: int, requests: int, queries: int, page: int) -> None:
    chosen = tiling(heads, requests, queries, fp8=True, on=limits(META))
    lengths = torch.empty(requests, dtype=torch.int32, device=META)
    parts = num_parts(chosen, heads, queries, META)
    schedule = decode_schedule_torch(lengths, max_length=4096, tiling=chosen, num_parts=parts)
    q = torch.empty(requests * queries, heads, 576, dtype=torch.bfloat16, device=META)
    mla_decode_triton(
        *q.split([512, 64], dim=-1),
        torch.empty(100, page, 576, dtype=dtype, device=META),
        torch.empty(64, 64, dtype=torch.int32, device=META),
        lengths.long(),
        lengths,
        schedule,
        scale=0.1,
        queries=queries,
        settled=True,
        kv_scale=0.7,
    )


def launch_gqa(dtype: torch.dtype, heads: int, groups: int, width: int, v_head_dim: int) -> None:
    row = width + v_head_dim
    chosen = gqa_tiling(heads // groups, row, head_dim=width, fp8=True, on=limits(META))
    lengths = torch.empty(8, dtype=torch.int32, device=META)
    gqa_decode_triton(
        torch.empty(8, heads, width, dtype=torch.bfloat16, device=META),
        torch.empty(100, 64, groups * row, dtype=dtype, device=META),
        torch.empty(64, 64, dtype=torch.int32, device=META),
        lengths.long(),
        lengths,
        decode_schedule_torch(lengths, max_length=4096, tiling=chosen, num_parts=64),
        torch.empty(8, heads, v_head_dim, dtype=torch.bfloat16, device=META),
        scale=0.1,
        scales=KVScales(0.7, 0.9),
    )


def launches() -> None:
    """Launches the first format on an H200: MLA with one new token, with drafted tokens, and with V3's heads, then Llama's
    heads and those of V2-Lite without absorption."""
    launch_usual(DTYPES[0])
    launch_mla(DTYPES[0], 16, 64, 1, 16)
    launch_mla(DTYPES[0], 16, 64, 2, 64)
    launch_mla(DTYPES[0], 16, 64, 4, 16)
    launch_gqa(DTYPES[0], 16, 16, 192, 128)


def launches_of_other_formats() -> None:
    for dtype in DTYPES[1:]:
        launch_usual(dtype)


def launch_usual(dtype: torch.dtype) -> None:
    launch_mla(dtype, 16, 8, 1, 64)
    launch_mla(dtype, 16, 64, 1, 64)
    launch_mla(dtype, 128, 64, 1, 64)
    launch_gqa(dtype, 32, 8, 128, 128)


def test_compiled_for_sm_90() -> None:
    check_on_h200(launches)


@pytest.mark.slow
def test_other_formats_compiled_for_sm_90() -> None:
    check_on_h200(launches_of_other_formats)


def check_on_h200(launched: Callable[[], None]) -> None:
    for report in compile_sm90(launched):
        check_fp8(report)
        if report.constants.get("ROWS") == 16:
            report.check_resident(tiling(16, 8, fp8=True, on=H200).programs_per_sm)


def launches_on_others() -> None:
    for found in LIMITS.values():
        with compiling_for(found):
            # E4M3 is refused before compute capability 8.9
            for dtype in DTYPES[found.architecture < 89 :]:
                launch_mla(dtype, 16, 64, 1, 64)
                launch_mla(dtype, 128, 64, 1, 64)
                launch_gqa(dtype, 32, 8, 128, 128)


@pytest.mark.slow
def test_compiled_for_other_gpus() -> None:
    reports = compile_sm90(launches_on_others)
    assert {report.architecture for report in reports} >= {80, 89, 100}
    for report in reports:
        check_fp8(report)


def check_fp8(report: Report) -> None:
    report.check_order()
    assert report.spill_bytes == 0, report
    assert report.shared_bytes <= LIMITS[report.architecture].shared_bytes, report


def test_tiles_are_within_the_limits() -> None:
    for found in LIMITS.values():
        for heads, requests, queries in product((1, 16, 128), (1, 300), (1, 2, 4)):
            chosen = tiling(heads, requests, queries, fp8=True, on=found)
            needed = chosen.shared_bytes(576, 576, fp8=True)
            assert needed <= found.shared_bytes
            assert chosen.programs_per_sm <= found.resident(needed)
