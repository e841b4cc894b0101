"""Collectives of few rows over shared memory: processes that interpret the kernel, against sums in float32."""

from __future__ import annotations

import random

import pytest
import torch

from mla_router.worker.kernels.comm import one_shot
from mla_router.worker.kernels.comm.one_shot import GENERATIONS, Mailboxes
from support.one_shot import OPS, Call, expected, in_files
from support.ranks import ranks
from support.sm90 import compile_sm90


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_calls_of_changing_shapes(size: int) -> None:
    """A row's width changes from call to call, and not every call has all rows. Ranks come late by turns."""
    draw = random.Random(size)
    calls = [
        Call(draw.choice(OPS), draw.randint(1, 4), draw.choice((1, 40, 64)), seed)
        for seed in range(24)
    ]
    processes = ranks(size)
    results = processes.call(in_files, processes.folder, calls, 0.004)
    for rank, of_rank in enumerate(results):
        for call, got in zip(calls, of_rank, strict=True):
            for result, wanted in zip(got, expected(call, rank, size, torch.float16), strict=True):
                close = 2 * torch.finfo(torch.float16).eps if call.op == "sum_add_norm" else 0.0
                torch.testing.assert_close(result, wanted, rtol=close, atol=0.0)
    for call, *of_ranks in zip(calls, *results, strict=True):
        if call.op != "scatter":
            assert all(torch.equal(got[0], of_ranks[0][0]) for got in of_ranks), call


def boxes(size: int, device: str = "meta") -> Mailboxes:
    return Mailboxes(
        1,
        torch.empty(GENERATIONS, 128, size, 8192, dtype=torch.bfloat16, device=device),
        torch.empty(size, dtype=torch.int64, device=device),
        torch.empty(128, dtype=torch.int32, device=device),
    )


def test_shape_and_dtype_decide() -> None:
    def serves(size: int, rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return boxes(size).serve(torch.empty(rows, width, dtype=dtype, device="meta"), rows)

    assert serves(2, 128, 7168) and not serves(2, 129, 64) and not serves(2, 0, 64)
    assert serves(8, 20, 7168) and not serves(8, 21, 7168)
    assert serves(2, 1, 8192) and not serves(2, 1, 8200)
    assert not serves(2, 1, 64, torch.float32)
    assert not boxes(2).serve(torch.empty(1, dtype=torch.bfloat16, device="meta"), 1)


def launches() -> None:
    """Launches the hidden sizes of V2-Lite and V3."""
    for size, width in ((2, 2048), (8, 7168)):
        x = torch.empty(16, width, dtype=torch.bfloat16, device="meta")
        one_shot.sum_rows(boxes(size), x)
        one_shot.sum_add_norm(boxes(size), x, x, x[0], 1e-6)
        one_shot.gather_rows(boxes(size), x)
        one_shot.scatter_rows(boxes(size), x)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
