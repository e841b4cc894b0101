"""The weighted sum of experts' results against float64, with rows of weight 0 that nobody has written."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.moe.combine import READS_ALL, Term, combine
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

TOP_K, HIDDEN = 3, 600


@pytest.mark.parametrize(
    ("tokens", "first", "count"),
    [(1, 0, 1), (READS_ALL, 0, READS_ALL), (READS_ALL, 5, 9), (READS_ALL + 1, READS_ALL, 1)],
)
def test_rows_with_weight_0_may_have_any_content(tokens: int, first: int, count: int) -> None:
    """Only `count` tokens from the `first` on have a term."""
    draw = torch.Generator().manual_seed(tokens)
    rows = torch.randn(tokens, TOP_K, HIDDEN, generator=draw)
    weights = torch.rand(tokens, TOP_K, generator=draw)
    plus = torch.randn(count, HIDDEN, generator=draw)
    weights[torch.rand(tokens, TOP_K, generator=draw) < 0.7] = 0.0
    expected = torch.einsum("tkn,tk->tn", rows.double(), weights.double())
    expected[first : first + count] += plus
    rows[weights == 0] = float("nan")
    flat = rows.view(-1, HIDDEN).to(DEVICE)
    got = combine(flat, weights.to(DEVICE), Term(plus.to(DEVICE), first))
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def launches() -> None:
    for tokens in (8, 1024):
        rows = torch.empty(tokens * 8, 7168, dtype=torch.bfloat16, device="meta")
        combine(rows, torch.empty(tokens, 8, device="meta"), Term(rows[:8], 0))
        combine(rows, torch.empty(tokens, 8, device="meta"))


def test_compiled_for_sm_90() -> None:
    reports = compile_sm90(launches)
    assert len(reports) == 4, reports
    for report in reports:
        report.check()
