"""The products around MLA's decode attention, against einsum in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.attention.absorb import (
    absorb_queries,
    absorb_queries_triton,
    expand_values,
    expand_values_triton,
    is_small,
    tiling,
)
from mla_router.worker.kernels.weight import Weight
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

NOPE, ROPE, LATENT, VALUE = 64, 16, 128, 32  # VALUE: two programs of 16 columns
HEADS = 3


def inputs(tokens: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q, a view of queries whose rotary part is NaN; w_uk and w_uv, halves of one matrix; latents."""
    draw = torch.Generator().manual_seed(tokens)
    q = torch.full((tokens, HEADS, NOPE + ROPE), float("nan"))
    q[..., :NOPE] = torch.randn(tokens, HEADS, NOPE, generator=draw)
    both = torch.randn(HEADS, NOPE + VALUE, LATENT, generator=draw) / 8
    latent = torch.randn(tokens, HEADS, LATENT, generator=draw)
    q, both, latent = (tensor.to(dtype).to(device) for tensor in (q, both, latent))
    return q[..., :NOPE], both[:, :NOPE], both[:, NOPE:], latent


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("absorb", "expand", "device"),
    [
        (
            lambda q, w_uk: absorb_queries(q, Weight(w_uk)),
            lambda latent, w_uv, out: expand_values(latent, Weight(w_uv), out),
            "cpu",
        ),
        *(
            (
                lambda q, w_uk, constant=constant: absorb_queries_triton(
                    q, Weight(w_uk, constant=constant)
                ),
                lambda latent, w_uv, out, constant=constant: expand_values_triton(
                    latent, Weight(w_uv, constant=constant), out
                ),
                DEVICE,
            )
            for constant in (False, True)
        ),
    ],
)
def test_formula(
    absorb: Callable[[Tensor, Tensor], Tensor],
    expand: Callable[[Tensor, Tensor, Tensor], None],
    device: str,
    dtype: torch.dtype,
    tokens: int,
) -> None:
    """The values are written to a part of wider memory, and the rest of it does not change."""
    q, w_uk, w_uv, latent = inputs(tokens, dtype, device)
    wide = torch.full((tokens + 1, HEADS, VALUE + 8), 7.0, dtype=dtype, device=device)
    out = wide[:tokens, :, :VALUE]
    expand(latent, w_uv, out)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    for got, equation, x, weight in (
        (absorb(q, w_uk), "thd,hdc->thc", q, w_uk),
        (out, "thc,hvc->thv", latent, w_uv),
    ):
        expected = torch.einsum(equation, x.double(), weight.double())
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    assert (wide[tokens] == 7).all() and (wide[..., VALUE:] == 7).all()


def test_limits_of_small_products() -> None:
    """At most 32 tokens, or 128 with few heads, and sizes that whole tiles cover, as in the checkpoints."""
    assert is_small(1, 128, 128, 512) and is_small(32, 128, 512, 128)
    assert not is_small(0, 128, 128, 512) and not is_small(33, 128, 128, 512)
    assert is_small(128, 16, 128, 512) and not is_small(129, 16, 128, 512)
    assert not any(is_small(1, 16, *widths) for widths in ((96, 512), (32, 512), (128, 192)))


@pytest.mark.parametrize("heads", [1, 8, 16, 64, 128])
def test_tiles_cover_small_products(heads: int) -> None:
    """With more heads there are more programs, and wider tiles read the queries less often."""
    for tokens in range(1, 129):
        latents, values = tiling(heads, tokens)
        assert 128 % latents == 128 % values == 0
        assert tiling(2 * heads, tokens) >= (latents, values)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(AssertionError, match=r"weight \(3, 64, 128\)"):
        absorb_queries_triton(torch.ones(2, 3, 32), Weight(torch.ones(3, 64, 128)))


def launches() -> None:
    """V2-Lite's 16 heads and V3's 128."""
    for heads in (16, 128):
        both = torch.empty(heads, 256, 512, dtype=torch.bfloat16, device="meta")
        for tokens, constant in product((1, 16, 32, 128), (True, False)):
            w_uk, w_uv = (Weight(w, constant=constant) for w in both.split(128, dim=1))
            q = both.new_empty(tokens, heads, 192)[..., :128]
            absorb_queries_triton(q, w_uk)
            latent, out = both.new_empty(tokens, heads, 512), both.new_empty(tokens, heads, 128)
            expand_values_triton(latent, w_uv, out)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
        assert report.starts_early, report
