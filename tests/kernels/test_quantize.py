"""quantize_rows: its torch form against the definition in float64, and the interpreted kernel against both."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.quantize import (
    LARGEST,
    padded_for_library,
    quantize_rows_torch,
    quantize_rows_triton,
)
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

FP8, INT8 = torch.float8_e4m3fn, torch.int8
# Half of the distance between the two largest values, relative to the largest
HALF_STEP = {FP8: 16 / 448, INT8: 0.5 / 127}


@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize(("columns", "group"), [(256, 128), (300, 128), (40, 64), (1, 128)])
def test_error_is_half_a_step_of_the_group(columns: int, group: int, dtype: torch.dtype) -> None:
    x = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns)) * 100
    got = quantize_rows_torch(x, dtype, group)
    assert got.scales.shape == (7, -(-columns // group)) and got.values.dtype == dtype
    for start in range(0, columns, group):
        part = x[:, start : start + group].double()
        largest = part.abs().amax(1, keepdim=True)
        scale = got.scales[:, start // group, None].double()
        torch.testing.assert_close(scale, largest / LARGEST[dtype], rtol=1e-6, atol=0)
        restored = got.values[:, start : start + group].double() * scale
        assert ((restored - part).abs() <= HALF_STEP[dtype] * largest * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_zeros_and_the_largest_value(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 256)
    x[1, 5], x[1, 200] = -3e38, 1e-30
    got = quantize_rows_torch(x, dtype)
    assert not got.values[0].any() and torch.isfinite(got.scales).all()
    # The scale is rounded: the largest value must not leave the range
    assert got.values[1, 5].item() == -LARGEST[dtype]
    assert got.values[1, 200].item() == LARGEST[dtype]


def test_nan_stays_in_its_place() -> None:
    x = torch.ones(1, 128)
    x[0, 3] = torch.nan
    got = quantize_rows_torch(x, FP8)
    assert got.values.float().isnan().nonzero().tolist() == [[0, 3]]
    assert got.scales.isfinite().all()


def test_kernel() -> None:
    """With INT8: the interpreter's conversion to FP8 loses carries. `tests/gpu` has FP8, bit by bit."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(9, 328, generator=draw).to(DEVICE, torch.float16)[:, :300]
    x[2, :128] = 0
    expected = quantize_rows_torch(x, INT8)
    got = quantize_rows_triton(x, INT8)
    assert torch.equal(got.scales, expected.scales)
    assert torch.equal(got.values, expected.values)
    padded = padded_for_library(got)
    assert padded.values.shape == (12, 300) and padded.values.is_contiguous()
    assert padded.scales.shape == (12, 3) and padded.scales.stride() == (1, 12)
    assert torch.equal(padded.values[:9], got.values)
    assert torch.equal(padded.scales[:9], got.scales)


def launches() -> None:
    for columns in (2048, 2816, 7168):
        x = torch.empty(1000, columns, dtype=torch.bfloat16, device="meta")
        for dtype in (FP8, INT8):
            quantize_rows_triton(x, dtype)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
