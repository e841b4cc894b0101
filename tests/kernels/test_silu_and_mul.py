"""silu_and_mul against its formula in float64, the kernel against the torch function."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.kernels.silu_and_mul import (
    gated_rows,
    gated_rows_triton,
    silu_and_mul,
    silu_and_mul_torch,
    silu_and_mul_triton,
)
from mla_router.worker.kernels.weight import PLAIN_ROWS, RowForm, dense_rows
from support.quantized import FORMS, assert_in_form
from support.sm90 import compile_sm90
from support.triton_device import DEVICE


@given(rows=st.integers(0, 5), width=st.integers(1, 70))
def test_formula(rows: int, width: int) -> None:
    draw = torch.Generator().manual_seed(rows * 1000 + width)
    gate = torch.randn(rows, width, generator=draw, dtype=torch.float64) * 4
    up = torch.randn(rows, width, generator=draw, dtype=torch.float64)
    got = silu_and_mul(torch.cat((gate, up), dim=-1).float())
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@given(rows=st.integers(0, 5), width=st.integers(1, 70))
def test_formula_of_gelu(rows: int, width: int) -> None:
    draw = torch.Generator().manual_seed(rows * 1000 + width)
    gate = torch.randn(rows, width, generator=draw, dtype=torch.float64) * 4
    up = torch.randn(rows, width, generator=draw, dtype=torch.float64)
    got = gated_rows(torch.cat((gate, up), dim=-1).float(), PLAIN_ROWS, "gelu_tanh")
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    expected = 0.5 * gate * (1 + inner.tanh()) * up
    torch.testing.assert_close(dense_rows(got).double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_kernel_of_gelu_is_the_function(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    gate_up = (8 * torch.randn(3, 2 * 1100, generator=draw)).to(DEVICE, dtype)
    torch.testing.assert_close(
        dense_rows(gated_rows_triton(gate_up, PLAIN_ROWS, "gelu_tanh")),
        dense_rows(gated_rows(gate_up.cpu(), PLAIN_ROWS, "gelu_tanh")).to(DEVICE),
        rtol=2 * torch.finfo(dtype).eps,
        atol=1e-5,  # near -5 the function is a small difference of large numbers
    )


def test_odd_width_is_named() -> None:
    with pytest.raises(AssertionError, match=r"gate_up \(2, 3\)"):
        silu_and_mul(torch.ones(2, 3))
    with pytest.raises(AssertionError, match=r"gate_up \(2, 3\)"):
        silu_and_mul_triton(torch.ones(2, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 6), (3, 2), (2, 2, 34), (2, 2 * 1100)])
def test_the_kernel_is_the_function(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Values far from 0, where the exponential overflows, and rows of a wider tensor."""
    draw = torch.Generator().manual_seed(sum(shape))
    wide = 30 * torch.randn(*shape[:-1], shape[-1] + 8, generator=draw)
    gate_up = wide.to(DEVICE, dtype)[..., 8:]
    torch.testing.assert_close(
        silu_and_mul_triton(gate_up),
        silu_and_mul_torch(gate_up),
        rtol=2 * torch.finfo(dtype).eps,
        atol=1e-7,
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [40, 300, 2816])
def test_rows_leave_in_the_form_of_their_products(form: RowForm, width: int) -> None:
    """Bit for bit as by a launch of the quantizer. The last group is cut off; a group of zeros, large numbers, NaN."""
    draw = torch.Generator().manual_seed(width)
    gate_up = torch.randn(5, 2 * width + 8, generator=draw).to(DEVICE, torch.float16)[:, 8:]
    gate_up[0, :128], gate_up[1, 3] = 0, 6e4
    gate_up[2, 2] = torch.nan if form.quantized == torch.float8_e4m3fn else 0
    assert_in_form(gated_rows_triton(gate_up, form), silu_and_mul_triton(gate_up), form)


def launches() -> None:
    """V2-Lite's dense layer, experts and shared experts, and V3's."""
    for width in (10944, 1408, 2816, 18432, 2048):
        gate_up = torch.empty(2, 2 * width, dtype=torch.bfloat16, device="meta")
        silu_and_mul_triton(gate_up)
        for form in FORMS if width in (1408, 18432) else ():  # the narrowest and the widest
            gated_rows_triton(gate_up, form)
    gated_rows_triton(gate_up, PLAIN_ROWS, "gelu_tanh")


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
