"""silu_and_mul against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.kernels.silu_and_mul import silu_and_mul


@given(rows=st.integers(0, 5), width=st.integers(1, 70))
def test_formula(rows: int, width: int) -> None:
    draw = torch.Generator().manual_seed(rows * 1000 + width)
    gate = torch.randn(rows, width, generator=draw, dtype=torch.float64) * 4
    up = torch.randn(rows, width, generator=draw, dtype=torch.float64)
    got = silu_and_mul(torch.cat((gate, up), dim=-1).float())
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


def test_odd_width_is_named() -> None:
    with pytest.raises(AssertionError, match=r"gate_up \(2, 3\)"):
        silu_and_mul(torch.ones(2, 3))
