"""Rows go only to the ranks of their experts, over gloo."""

from __future__ import annotations

import pytest
import torch

from support import all_to_all
from support.all_to_all import Rows, expected
from support.ranks import ranks


@pytest.mark.parametrize("size", [2, 4])
def test_rows_and_results_of_chosen_ranks(size: int) -> None:
    """Rows that were not sent are NaN, and so are results that must not come back."""
    counts = [(5,) * size, (7, 0, 3, 2)[:size], (0,) * size]
    dtypes = (None, torch.float8_e4m3fn, torch.int8)
    cases = [
        Rows(each, 192, dtype, seed)
        for seed, (each, dtype) in enumerate((each, dtype) for each in counts for dtype in dtypes)
    ]
    for rank, outcomes in enumerate(ranks(size).call(all_to_all.over_gloo, cases)):
        for rows, outcome in zip(cases, outcomes, strict=True):
            for got, wanted in zip(outcome, expected(rows, rank, torch.float32), strict=True):
                assert torch.equal(got, wanted), rows
