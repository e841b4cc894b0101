"""rms_norm and add_rms_norm in bfloat16, at the sizes of V2-Lite, V3 and Gemma 2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.rms_norm import add_rms_norm, norm_rows, rms_norm
from mla_router.worker.kernels.weight import PLAIN_ROWS, RowForm, dense_rows
from support.cuda import captured, forbid_waiting
from support.quantized import FORMS, assert_in_form

pytestmark = pytest.mark.gpu


def exact(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the norm in float64, with the rounding before the weight."""
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed.to(x.dtype).double() * weight.double()


@pytest.mark.parametrize("width", [512, 1536, 2048, 7168])
@pytest.mark.parametrize("rows", [0, 1, 33, 4096])
def test_float64(rows: int, width: int) -> None:
    torch.manual_seed(width)
    x, residual = torch.randn(2, rows, width, device="cuda").bfloat16()
    weight = torch.randn(width, device="cuda").bfloat16()
    with forbid_waiting():
        got = rms_norm(x, weight, 1e-6)
        normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    for result, source in ((got, x), (normed, total)):
        # Two roundings to 8 bits; the first may differ from float64's
        torch.testing.assert_close(
            result.double(), exact(source, weight, 1e-6), rtol=3 * 2**-8, atol=1e-30
        )


@pytest.mark.parametrize("width", [2304, 3584, 4608])
@pytest.mark.parametrize("rows", [1, 33, 4096])
def test_float32_weights_and_a_norm_before_the_sum(rows: int, width: int) -> None:
    """At the sizes of Gemma 2."""
    torch.manual_seed(width)
    x, residual = torch.randn(2, rows, width, device="cuda").bfloat16()
    before, weight = 1 + torch.randn(2, width, device="cuda") / 4
    with forbid_waiting():
        normed, total = norm_rows(x, residual, weight, 1e-6, PLAIN_ROWS, before)
    wide = x.double()
    first = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * before.double()
    # The norm and the sum are rounded once each
    atol = 2**-8 * float(first.abs().max())
    torch.testing.assert_close(total.double(), first + residual.double(), rtol=2**-8, atol=atol)
    wide = total.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(dense_rows(normed).double(), expected, rtol=1.01 * 2**-8, atol=1e-30)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [1536, 2048, 7168])
@pytest.mark.parametrize("rows", [2, 33, 128])
def test_rows_leave_in_the_form_of_their_products(rows: int, width: int, form: RowForm) -> None:
    """Bit for bit as by a launch of the quantizer. A group of zeros, a large number, and a row of NaN."""
    torch.manual_seed(width)
    x, residual = torch.randn(2, rows, width, device="cuda").bfloat16()
    weight = torch.randn(width, device="cuda").bfloat16()
    weight[128:256], x[0, 7] = 0, 3e38
    if form.quantized == torch.float8_e4m3fn:
        x[-1, 5] = torch.nan
    with forbid_waiting():
        got, _ = norm_rows(x, residual, weight, 1e-6, form)
    assert_in_form(got, add_rms_norm(x, residual, weight, 1e-6)[0], form)


def test_in_a_cuda_graph() -> None:
    x, residual = torch.randn(2, 8, 2048, device="cuda").bfloat16()
    weight = torch.randn(2048, device="cuda").bfloat16()
    replay, (normed, total) = captured(lambda: add_rms_norm(x, residual, weight, 1e-6))
    x.copy_(torch.randn_like(x))
    replay()
    expected, expected_total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(normed, expected) and torch.equal(total, expected_total)
