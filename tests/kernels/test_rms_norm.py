"""rms_norm and add_rms_norm against their formula in float64, the kernel against the torch function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_router.worker.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_torch,
    add_rms_norm_triton,
    norm_rows,
    norm_rows_triton,
    rms_norm,
    rms_norm_torch,
    rms_norm_triton,
)
from mla_router.worker.kernels.weight import PLAIN_ROWS, RowForm
from support.quantized import FORMS, assert_in_form
from support.sm90 import compile_sm90
from support.triton_device import DEVICE


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
    with pytest.raises(AssertionError, match=r"x \(2, 8\).*residual \(3, 8\).*weight \(8,\)"):
        add_rms_norm_triton(torch.ones(2, 8), torch.ones(3, 8), torch.ones(8), 1e-6)


def test_the_sum_is_rounded_before_it_is_normalised() -> None:
    x, residual = torch.tensor([[256.0, 0]]).bfloat16(), torch.tensor([[1.0, 1]]).bfloat16()
    normed, total = add_rms_norm(x, residual, torch.ones(2).bfloat16(), 0.0)
    assert total.tolist() == [[256.0, 1.0]]  # bfloat16 has no 257
    assert torch.equal(normed, rms_norm(total, torch.ones(2).bfloat16(), 0.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(0, 16), (3, 1), (5, 130), (2, 2048)])
def test_the_kernel_is_the_function(dtype: torch.dtype, rows: int, width: int) -> None:
    """Strided rows among NaN; equal up to the order of the sum."""
    draw = torch.Generator().manual_seed(width)
    wide = torch.full((2, rows, width + 3), float("nan"), dtype=dtype)
    wide[:, :, 2:-1] = torch.randn(2, rows, width, generator=draw)
    x, residual = wide.to(DEVICE)[:, :, 2:-1]
    weight = torch.randn(width, generator=draw).to(DEVICE, dtype)
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0.0}
    torch.testing.assert_close(
        rms_norm_triton(x, weight, 1e-6), rms_norm_torch(x, weight, 1e-6), **close
    )
    normed, total = add_rms_norm_triton(x, residual, weight, 1e-6)
    expected, expected_total = add_rms_norm_torch(x, residual, weight, 1e-6)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, **close)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("width", [300, 1536])
def test_rows_leave_in_the_form_of_their_products(form: RowForm, added: bool, width: int) -> None:
    """Bit for bit as by a launch of the quantizer. A group of zeros, a large number, and a row of NaN."""
    draw = torch.Generator().manual_seed(width)
    x, residual = torch.randn(2, 5, width, generator=draw).to(DEVICE, torch.float16)
    weight = torch.randn(width, generator=draw).to(DEVICE, torch.float16)
    weight[128:256] = 0
    x[1, 7], x[2, 3] = 6e4, torch.nan if form.quantized == torch.float8_e4m3fn else 0
    other = residual if added else None
    plain, total = norm_rows_triton(x, other, weight, 1e-6, PLAIN_ROWS)
    assert isinstance(plain, torch.Tensor)
    got, got_total = norm_rows_triton(x, other, weight, 1e-6, form)
    assert torch.equal(got_total.view(torch.int16), total.view(torch.int16))
    assert_in_form(got, plain, form)


def test_definition_of_rows_in_a_form() -> None:
    x = torch.randn(3, 256).half()
    got, _ = norm_rows(x, None, torch.ones(256).half(), 1e-6, RowForm(True, torch.int8))
    assert_in_form(got, rms_norm(x, torch.ones(256).half(), 1e-6), RowForm(True, torch.int8))


@pytest.mark.parametrize("op", [rms_norm_torch, rms_norm_triton])
def test_with_a_float32_weight_rows_are_rounded_once(op: Callable[..., Tensor]) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, 500, generator=draw).to(DEVICE, torch.float16)
    weight = 1 + torch.randn(500, generator=draw).to(DEVICE) / 4
    wide = x.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    got = op(x, weight, 1e-6)
    assert got.dtype == torch.float16
    error = (got.double() - exact).abs() / exact.abs()
    assert error.max() <= 0.501 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize("op", [norm_rows, norm_rows_triton])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_norm_before_the_sum(op: Callable[..., Any], dtype: torch.dtype) -> None:
    """As by a launch of each norm, up to the order of sums."""
    draw = torch.Generator().manual_seed(1)
    x, residual = torch.randn(2, 3, 130, generator=draw).to(DEVICE, dtype)
    before, weight = 1 + torch.randn(2, 130, generator=draw).to(DEVICE) / 4
    got, total = op(x, residual, weight, 1e-6, PLAIN_ROWS, before)
    expected, expected_total = add_rms_norm_torch(
        rms_norm_torch(x, before, 1e-6), residual, weight, 1e-6
    )
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    torch.testing.assert_close(total, expected_total, **close)
    torch.testing.assert_close(got, expected, **close)


def launches() -> None:
    """Launches the sizes of V2-Lite and V3: hidden size, latents of queries, latents of keys and values; and those of Gemma
    2 9B and 27B."""
    for width in (2048, 512, 7168, 1536):
        x = torch.empty(2, width, dtype=torch.bfloat16, device="meta")
        rms_norm_triton(x, x[0], 1e-6)
        add_rms_norm_triton(x, x, x[0], 1e-6)
        for form in FORMS if width in (2048, 7168) else ():  # latents are quantized elsewhere
            norm_rows_triton(x, x, x[0], 1e-6, form)
    for width in (3584, 4608):
        x = torch.empty(2, width, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(width, device="meta")
        rms_norm_triton(x, weight, 1e-6)
        norm_rows_triton(x, x, weight, 1e-6, PLAIN_ROWS, weight)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
