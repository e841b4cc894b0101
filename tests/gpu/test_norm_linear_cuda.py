"""norm_linear in bfloat16 at real shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.linear import linear_triton
from mla_router.worker.kernels.linear_hopper import is_fastest
from mla_router.worker.kernels.norm_linear import (
    MAX_REREAD_INPUTS,
    has_kernel,
    norm_linear,
    norm_linear_triton,
    tiling,
)
from mla_router.worker.kernels.rms_norm import add_rms_norm, rms_norm
from mla_router.worker.kernels.weight import PLAIN_ROWS, RowForm, Weight
from support.cuda import captured, forbid_waiting
from support.quantized import FORMS, assert_in_form

pytestmark = pytest.mark.gpu

EPS = 1e-6
# V2-Lite's joined projection, V3's, V3's queries from their latent, Llama's
SHAPES = [(3648, 2048), (2112, 7168), (24576, 1536), (6144, 4096)]


def inputs(outputs: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x is a view, as V3's query latent is."""
    torch.manual_seed(width)
    x = torch.randn(1, width + 576, device="cuda").bfloat16()[:, :width]
    residual = torch.randn(1, width, device="cuda").bfloat16()
    scale = (1 + torch.randn(width, device="cuda") / 4).bfloat16()
    weight = (torch.randn(outputs, width, device="cuda") / width**0.5).bfloat16()
    return x, residual, scale, weight


def exact(total: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Returns the product in float64, with the roundings of the normalized row."""
    wide = total.double()
    normed = (wide / (wide.square().mean() + EPS).sqrt()).bfloat16().double()
    return (normed * scale.double()).bfloat16().double() @ weight.double().T


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(("outputs", "width"), SHAPES)
def test_float64(outputs: int, width: int, added: bool, constant: bool) -> None:
    x, residual, scale, weight = inputs(outputs, width)
    is_joined = width <= MAX_REREAD_INPUTS and not is_fastest(x, outputs, width)
    assert has_kernel(x, outputs) == is_joined
    other = residual if added else None
    with forbid_waiting():
        got, total, _ = norm_linear(x, other, scale, EPS, Weight(weight, constant=constant))
    assert torch.equal(total, x + residual if added else x)
    expected = exact(total, scale, weight)
    assert (got.double() - expected).abs().max() / expected.abs().max() < 2**-8


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize(("outputs", "width"), SHAPES)
def test_as_the_two_kernels(outputs: int, width: int, added: bool) -> None:
    """Equal bit for bit: with the same tiles all sums have the same order."""
    x, residual, scale, weight = inputs(outputs, width)
    normed = add_rms_norm(x, residual, scale, EPS)[0] if added else rms_norm(x, scale, EPS)
    block_outputs, num_warps = tiling(1, width, outputs)
    tiles = (block_outputs, 1 << (width - 1).bit_length(), num_warps)
    expected = linear_triton(normed, weight, out_dtype=x.dtype, tiles=tiles)
    other = residual if added else None
    got, _, _ = norm_linear_triton(x, other, scale, EPS, weight, out_dtype=x.dtype)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("rows", "outputs", "width"),
    [
        (2, 64, 2048),
        (64, 64, 2048),
        (100, 64, 2048),
        (256, 64, 2048),
        (1, 160, 5120),
        (1, 256, 7168),
    ],
)
def test_routers(rows: int, outputs: int, width: int) -> None:
    _, _, scale, weight = inputs(outputs, width)
    x, residual = torch.randn(2, rows, width, device="cuda").bfloat16()
    assert has_kernel(x, outputs)
    with forbid_waiting():
        got, total, normed = norm_linear(
            x,
            residual,
            scale,
            EPS,
            Weight(weight, constant=True),
            out_dtype=torch.float32,
            keep=PLAIN_ROWS,
        )
    expected_normed, expected_total = add_rms_norm(x, residual, scale, EPS)
    assert normed is not None and torch.equal(total, expected_total)
    assert (normed.double() - expected_normed.double()).norm() < 1e-3 * normed.double().norm()
    expected = normed.double() @ weight.double().T
    assert (got.double() - expected).abs().max() / expected.abs().max() < 1e-5


def test_chain_in_a_cuda_graph() -> None:
    """Each kernel starts while the kernel before it still runs, and reads its results."""
    first, residual, scale, weight = inputs(2048, 2048)

    def chain() -> tuple[Tensor, Tensor]:
        x, total = first, residual
        for _ in range(10):
            x, total, _ = norm_linear(x, total, scale, EPS, Weight(weight, constant=True))
        return x, total

    replay, (x, sums) = captured(chain)
    for _ in range(3):
        first.copy_(torch.randn_like(first))
        weight.mul_(0.9)  # after the capture: the graph has no copy of it
        replay()
        expected, total = first, residual
        for _ in range(10):
            normed, total = add_rms_norm(expected, total, scale, EPS)
            expected = linear_triton(normed, weight, out_dtype=x.dtype)
            torch.cuda.synchronize()
        assert torch.equal(sums, total)
        assert torch.equal(x, expected)


def test_other_shapes_and_dtypes_have_no_kernel() -> None:
    row = torch.empty(1, 2048, device="cuda", dtype=torch.bfloat16)
    assert not has_kernel(row.expand(2, -1), 3648) and not has_kernel(row.float(), 3648)
    assert not has_kernel(row, 102400) and not has_kernel(row.new_empty(1, 16384), 3648)
    assert not has_kernel(row.new_empty(1, 7168), 2112)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [2, 16, 64, 65, 128])
def test_rows_are_kept_in_the_form_of_other_products(rows: int, form: RowForm) -> None:
    torch.manual_seed(rows)
    x, residual = torch.randn(2, rows, 2048, device="cuda").bfloat16()
    scale = torch.randn(2048, device="cuda").bfloat16()
    router = Weight((torch.randn(64, 2048, device="cuda") / 45).bfloat16(), constant=True)
    how = {"out_dtype": torch.float32}
    plain = norm_linear(x, residual, scale, EPS, router, **how, keep=PLAIN_ROWS)  # type: ignore[arg-type]
    with forbid_waiting():
        got = norm_linear(x, residual, scale, EPS, router, **how, keep=form)  # type: ignore[arg-type]
    assert isinstance(plain.normed, Tensor) and got.normed is not None
    assert torch.equal(got.product, plain.product) and torch.equal(got.total, plain.total)
    assert_in_form(got.normed, plain.normed, form)
