"""Rows of the output projection from attended latents: against einsum in float64, and bit for bit as quantized apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.attention import expand_rows as module
from mla_router.worker.kernels.attention.absorb_quantized import StaticFP8
from mla_router.worker.kernels.attention.expand_rows import (
    Tiles,
    expand_rows,
    expand_rows_triton,
    is_served,
    tiling,
)
from mla_router.worker.kernels.weight import PLAIN_ROWS, Quantized, RowForm, Weight
from support.quantized import FORMS, assert_in_form, drawn_weight
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

HEADS, VALUE, LATENT = 3, 128, 256
FP8 = torch.float8_e4m3fn
BOTH = RowForm(plain=True, quantized=FP8)


def inputs(tokens: int) -> tuple[Tensor, Tensor]:
    """Returns latents, a view, and w_uv, half of a larger matrix."""
    draw = torch.Generator().manual_seed(tokens)
    wide = torch.randn(tokens, HEADS, LATENT + 8, generator=draw)
    both = torch.randn(HEADS, 64 + VALUE, LATENT, generator=draw) / 16
    latent, both = wide.to(DEVICE, torch.float16), both.to(DEVICE, torch.float16)
    return latent[..., :LATENT], both[:, 64:]


@pytest.mark.parametrize("tiles", [Tiles(16, 8, 1, True), Tiles(32, 4, 2, False)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 5, 17, 40])
def test_formula(tokens: int, form: RowForm, tiles: Tiles) -> None:
    """The first token has zeros alone."""
    latent, w_uv = inputs(tokens)
    latent[0] = 0
    expected = torch.einsum("thc,hvc->thv", latent.double(), w_uv.double()).flatten(1)
    weight = Weight(w_uv, constant=tiles.ahead)
    both = expand_rows_triton(latent, weight, BOTH, tiles=tiles)
    assert isinstance(both, Quantized) and both.plain is not None
    torch.testing.assert_close(both.plain.double(), expected, rtol=4e-3, atol=4e-3)
    got = expand_rows_triton(latent, weight, form, tiles=tiles)
    assert_in_form(got, both.plain, form)


def test_definition_of_rows_in_a_form() -> None:
    """Plain rows, and quantized ones by a launch of the quantizer; also of quantized weights with rounded latents."""
    latent, w_uv = (tensor.cpu().float() for tensor in inputs(5))
    expected = torch.einsum("thc,hvc->thv", latent.double(), w_uv.double()).flatten(1)
    for form in (PLAIN_ROWS, BOTH):
        got = expand_rows(latent, Weight(w_uv), form)
        plain = got.plain if isinstance(got, Quantized) else got
        assert plain is not None
        torch.testing.assert_close(plain.double(), expected, rtol=1e-5, atol=1e-5)
    weight = drawn_weight(HEADS, VALUE, LATENT)
    rounded = expand_rows(latent, weight, PLAIN_ROWS, StaticFP8(FP8))
    assert isinstance(rounded, Tensor)
    assert not torch.equal(rounded, expand_rows(latent, weight, PLAIN_ROWS))


def test_served_shapes() -> None:
    """Many heads of one group of values, with plain weights, in decode steps."""
    w_uv = torch.empty(64, 128, 512, device="meta")
    latent = torch.empty(128, 64, 512, device="meta")
    assert is_served(latent, Weight(w_uv))
    assert not is_served(latent[:0], Weight(w_uv))
    assert not is_served(torch.cat((latent, latent)), Weight(w_uv))
    assert not is_served(latent[:, :16], Weight(w_uv[:16]))
    assert not is_served(latent, Weight(w_uv[:, :64]))
    assert not is_served(latent, drawn_weight(64, 128, 512))


def launches() -> None:
    """V3's 128 heads, with plain rows and without, and the half of two ranks without."""
    for heads in (64, 128):
        both = torch.empty(heads, 256, 512, dtype=torch.bfloat16, device="meta")
        for tokens in (9, 32, 64, 128):
            latent = both.new_empty(tokens, heads, 512)
            for constant in (True, False):
                w_uv = Weight(both[:, 128:], constant=constant)
                expand_rows_triton(latent, w_uv, FORMS[0])
                if heads == 128:
                    expand_rows_triton(latent, w_uv, BOTH)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
        assert report.starts_early and report.reads_ahead == report.constants["AHEAD"], report


@pytest.mark.parametrize("heads", [64, 128])
def test_tiles_of_one_wave(heads: int) -> None:
    for tokens in range(1, module.MAX_TOKENS + 1):
        rows = tiling(heads, tokens, constant=True).rows
        assert heads * -(-tokens // rows) <= 132
