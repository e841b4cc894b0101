"""Numbers of one byte in float32: torch's conversion of each, one by one, is the reference."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.widen import to_float32


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_all_codes(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    # The first half has the NaN of positive sign, single codes may have none
    for part in (codes, codes[:128], codes.view(16, 16)[:, 3:5].t(), codes[:0]):
        expected = torch.tensor([float(code) for code in part.flatten()]).view(part.shape)
        got = to_float32(part)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit()[~got.isnan()], expected.signbit()[~got.isnan()])
