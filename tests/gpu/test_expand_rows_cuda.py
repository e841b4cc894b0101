"""Rows of the output projection from attended latents in bfloat16, at the shapes of V3, of V2-Lite, and of two ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.attention.expand_rows import expand_rows
from mla_router.worker.kernels.weight import Quantized, RowForm, Weight
from support.cuda import captured, forbid_waiting
from support.quantized import FORMS, assert_in_form

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
BOTH = RowForm(plain=True, quantized=FP8)


def inputs(tokens: int, heads: int, *, constant: bool = True) -> tuple[Tensor, Weight]:
    torch.manual_seed(tokens)
    latent = torch.randn(tokens, heads, 512, device="cuda").bfloat16()
    both = (torch.randn(heads, 256, 512, device="cuda") / 16).bfloat16()
    return latent, Weight(both[:, 128:], constant=constant)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("tokens", [1, 9, 17, 32, 40, 64, 100, 128])
def test_float64(tokens: int, constant: bool, heads: int) -> None:
    latent, w_uv = inputs(tokens, heads, constant=constant)
    with forbid_waiting():
        got = expand_rows(latent, w_uv, BOTH)
    assert isinstance(got, Quantized) and got.plain is not None
    expected = torch.einsum("thc,hvc->thv", latent.double(), w_uv.values.double()).flatten(1)
    assert (got.plain.double() - expected).norm() / expected.norm() < 3e-3
    assert_in_form(got, got.plain, BOTH)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("tokens", [17, 64, 128])
def test_forms(tokens: int, heads: int, form: RowForm) -> None:
    """A token of zeros, large numbers, and NaN in one head."""
    latent, w_uv = inputs(tokens, heads)
    latent[0], latent[1] = 0, 1e30
    if form.quantized == FP8:
        latent[2, 1, 7] = torch.nan
    both = expand_rows(latent, w_uv, RowForm(plain=True, quantized=form.quantized))
    got = expand_rows(latent, w_uv, form)
    assert isinstance(both, Quantized) and both.plain is not None
    assert_in_form(got, both.plain, form)
    if form.quantized == FP8:
        assert both.values.float().isnan().sum() == 128


def test_in_a_graph() -> None:
    latent, w_uv = inputs(32, 128)
    replay, got = captured(lambda: expand_rows(latent * 1, w_uv, BOTH))
    latent.mul_(0.5)
    replay()
    expected = expand_rows(latent, w_uv, BOTH)
    assert isinstance(got, Quantized) and isinstance(expected, Quantized)
    assert torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(got.scales, expected.scales)
