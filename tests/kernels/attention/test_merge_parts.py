"""merge_parts against a softmax over the parts of each row in float64."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.attention.decode_schedule import DecodeSchedule
from mla_router.worker.kernels.attention.decode_tiling import MergeTiling, merge_tiling, tiling
from mla_router.worker.kernels.attention.merge_parts import merge_parts, partial_results
from mla_router.worker.kernels.device import H200
from support.partial_results import random_results
from support.sm90 import compile_sm90
from support.triton_device import DEVICE


@pytest.mark.parametrize("width", [32, 80])
@pytest.mark.parametrize("tiles", [MergeTiling(32, 8), MergeTiling(32, 8, block_rows=2), None])
def test_softmax(tiles: MergeTiling | None, width: int) -> None:
    """Requests with 1 to 20 parts. A row with a single part does not change."""
    results = random_results([2, 1, 4, 7, 24, 25, 58, 4], 3, rows=3, width=width, device=DEVICE)
    assert {len(pieces) for pieces in results.pieces} == {1, 2, 3, 9, 20}
    out = torch.full((8, 3, width), 7.0, device=DEVICE)
    merge_parts(results.out, results.lse, results.schedule, out, tiles=tiles)
    for got, expected in zip(out, results.merged(), strict=True):
        if expected is None:
            assert (got == 7).all()
        else:
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_few_rows_are_cut_along_the_columns() -> None:
    assert merge_tiling(16, 512) == MergeTiling(32, 64)
    assert merge_tiling(32, 512) == MergeTiling(64, 64)
    assert merge_tiling(128, 512) == MergeTiling(64, 8, num_warps=1)
    assert merge_tiling(512, 512) == MergeTiling(512, 8)
    assert merge_tiling(1024, 512) == MergeTiling(512, 4, num_warps=2)
    assert merge_tiling(1024, 80).block_width == 128
    assert merge_tiling(8192, 512) == MergeTiling(512, 4, num_warps=2, block_rows=4)


def launches() -> None:
    """MLA's with 16 heads, for 1, 2, 8, 32, 64 and 512 requests."""
    for requests in (1, 2, 8, 32, 64, 512):
        starts = torch.empty(requests + 1, dtype=torch.int32, device="meta")
        schedule = DecodeSchedule(
            starts, starts.new_empty(264), starts[:1], 1, tiling(16, requests, on=H200)
        )
        out = torch.empty(requests, 16, 512, dtype=torch.bfloat16, device="meta")
        chosen = merge_tiling(requests * 16, 512)
        for settled in (False, True):
            results = partial_results(schedule, out, 16)
            merge_parts(*results, schedule, out, settled=settled, tiles=chosen)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
        assert report.starts_early, report
        assert report.reads_ahead == report.constants["SETTLED"], report
