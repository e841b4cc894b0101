"""Scores keep what 16 bits would round away."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.linear_float32 import linear_float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_formula(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 40).to(dtype), torch.randn(7, 40).to(dtype)
    got = linear_float32(x, weight)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
