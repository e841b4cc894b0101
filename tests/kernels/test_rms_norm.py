"""rms_norm against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.kernels.rms_norm import rms_norm


@given(rows=st.integers(0, 5), width=st.integers(1, 130), eps=st.sampled_from([1e-6, 1e-5, 0.1]))
def test_formula(rows: int, width: int, eps: float) -> None:
    draw = torch.Generator().manual_seed(rows * 1000 + width)
    x = torch.randn(rows, width, generator=draw, dtype=torch.float64)
    weight = torch.randn(width, generator=draw, dtype=torch.float64)
    expected = x / (x.square().sum(-1, keepdim=True) / width + eps).sqrt() * weight
    got = rms_norm(x.float(), weight.float(), eps)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_sums_in_float32() -> None:
    x = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)  # a bfloat16 sum would stop at 256
    got = rms_norm(x, torch.full((4096,), 3.0, dtype=torch.bfloat16), 0.0)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.full_like(x, 3.0))


def test_wrong_width_is_named() -> None:
    with pytest.raises(AssertionError, match=r"x \(2, 8\), weight \(4,\)"):
        rms_norm(torch.ones(2, 8), torch.ones(4), 1e-6)
