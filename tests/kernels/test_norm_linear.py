"""norm_linear against its formula in float64 and, bit for bit, against the kernels that it joins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels import norm_linear as module
from mla_router.worker.kernels.linear import linear_triton
from mla_router.worker.kernels.norm_linear import (
    NormLinear,
    has_kernel,
    norm_linear,
    norm_linear_triton,
    tiling,
)
from mla_router.worker.kernels.rms_norm import add_rms_norm_triton, rms_norm_triton
from mla_router.worker.kernels.weight import PLAIN_ROWS, RowForm, Weight
from support.quantized import FORMS, assert_in_form
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

EPS = 1e-6
# (outputs, inputs): V2-Lite's joined projection, V3's, V3's queries from their latent, Llama's
SHAPES = [(3648, 2048), (2112, 7168), (24576, 1536), (6144, 4096)]
# (rows, outputs, inputs): routers of V2-Lite, V2 and V3, with the most rows of the kernel
ROUTERS = [(256, 64, 2048), (1, 160, 5120), (1, 256, 7168)]


def inputs(outputs: int, width: int, dtype: torch.dtype, rows: int = 1) -> tuple[Tensor, ...]:
    """Returns rows, residual, and the weights of norm and projection. Memory around the rows is NaN."""
    draw = torch.Generator().manual_seed(outputs + width)
    wide = torch.full((2, rows + 2, width + 5), float("nan"))
    wide[:, 1:-1, 2:-3] = torch.randn(2, rows, width, generator=draw)
    scale = 1 + torch.randn(width, generator=draw) / 4
    weight = torch.randn(outputs, width, generator=draw) / width**0.5
    x, residual = wide.to(DEVICE, dtype)[:, 1:-1, 2:-3]
    return x, residual, scale.to(DEVICE, dtype), weight.to(DEVICE, dtype)


def by_weight(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor,
    eps: float,
    weight: Tensor,
    *,
    constant: bool,
    **options: Any,
) -> NormLinear:
    """`norm_linear` with the arguments of `norm_linear_triton`."""
    return norm_linear(x, residual, scale, eps, Weight(weight, constant=constant), **options)


@pytest.mark.parametrize("op", [by_weight, norm_linear_triton])
@pytest.mark.parametrize(("added", "constant"), [(True, True), (False, False)])
@pytest.mark.parametrize(
    ("rows", "outputs", "width"),
    [
        (1, 1, 16),
        (1, 37, 64),
        (3, 64, 130),
        (9, 5, 1000),
        (65, 64, 130),
        (80, 1, 16),
        (97, 5, 1000),
    ],
)
def test_formula(
    op: object, added: bool, constant: bool, rows: int, outputs: int, width: int
) -> None:
    assert callable(op)
    x, residual, scale, weight = inputs(outputs, width, torch.float32, rows)
    got, total, kept = op(
        x,
        residual if added else None,
        scale,
        EPS,
        weight,
        out_dtype=torch.float32,
        keep=PLAIN_ROWS,
        constant=constant,
    )
    wide = x.double() + residual.double() if added else x.double()
    torch.testing.assert_close(total.double(), wide, rtol=1e-6, atol=1e-6)
    normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * scale.double()
    torch.testing.assert_close(kept.double(), normed, rtol=1e-5, atol=1e-5)
    expected = normed @ weight.double().T
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_wider_products_are_not_rounded() -> None:
    x, residual, scale, weight = inputs(7, 64, torch.float16, rows=3)
    got, _, normed = norm_linear_triton(
        x, residual, scale, EPS, weight, out_dtype=torch.float32, keep=PLAIN_ROWS
    )
    assert normed is not None and normed.dtype == torch.float16 and got.dtype == torch.float32
    expected = normed.double() @ weight.double().T
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "width"), [(3, 1280), (70, 1000)])
def test_rows_are_kept_in_the_form_of_other_products(form: RowForm, rows: int, width: int) -> None:
    """Bit for bit as by a launch of the quantizer; with whole rows in a program, and with blocks of rows."""
    x, residual, scale, weight = inputs(19, width, torch.float16, rows)
    scale[128:256] = 0
    how = {"out_dtype": torch.float32}
    plain = norm_linear_triton(x, residual, scale, EPS, weight, **how, keep=PLAIN_ROWS)
    got = norm_linear_triton(x, residual, scale, EPS, weight, **how, keep=form)
    assert isinstance(plain.normed, Tensor) and got.normed is not None
    assert torch.equal(got.product, plain.product) and torch.equal(got.total, plain.total)
    assert_in_form(got.normed, plain.normed, form)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize(("outputs", "width"), [(6, 64), (37, 130), (9, 2048)])
def test_as_the_two_kernels(dtype: torch.dtype, added: bool, outputs: int, width: int) -> None:
    """With equal blocks of inputs the sums have the same order."""
    x, residual, scale, weight = inputs(outputs, width, dtype)
    if added:
        normed, expected_total = add_rms_norm_triton(x, residual, scale, EPS)
    else:
        normed, expected_total = rms_norm_triton(x, scale, EPS), x
    tiles = (4, 1 << (width - 1).bit_length(), 4)
    expected = linear_triton(normed, weight, out_dtype=dtype, tiles=tiles)
    other = residual if added else None
    got, total, kept = norm_linear_triton(x, other, scale, EPS, weight, out_dtype=dtype)
    assert kept is None
    assert torch.equal(total, expected_total)
    assert torch.equal(got, expected)


def test_bfloat16_is_rounded_as_the_two_ops_round() -> None:
    x = torch.tensor([[256.0, 1.0]]).bfloat16()
    residual = torch.tensor([[1.0, 0.0]]).bfloat16()  # bfloat16 has no 257
    scale = torch.tensor([1.0, 3.0]).bfloat16()
    got, total, _ = norm_linear(x, residual, scale, 0.0, Weight(torch.eye(2).bfloat16()))
    assert total.tolist() == [[256.0, 1.0]]
    rms = (256.0**2 / 2 + 0.5) ** 0.5
    rounded = (torch.tensor([256.0, 1.0]) / rms).bfloat16()
    assert torch.equal(got, (rounded * scale)[None])


def test_wrong_shapes_are_named() -> None:
    row, scale, dtype = torch.ones(1, 8), torch.ones(8), torch.float32
    with pytest.raises(AssertionError, match=r"weight \(4, 7\)"):
        norm_linear_triton(row, row, scale, EPS, torch.ones(4, 7), out_dtype=dtype)
    with pytest.raises(AssertionError, match=r"x \(257, 8\)"):
        norm_linear_triton(torch.ones(257, 8), None, scale, EPS, torch.ones(4, 8), out_dtype=dtype)
    with pytest.raises(AssertionError, match=r"residual \(1, 7\)"):
        norm_linear_triton(row, torch.ones(1, 7), scale, EPS, torch.ones(4, 8), out_dtype=dtype)


def launches() -> None:
    for outputs, width in SHAPES:
        x = torch.empty(1, width, dtype=torch.bfloat16, device="meta")
        weight = x.new_empty(outputs, width)
        for constant in (True, False):
            how = {"out_dtype": x.dtype, "constant": constant}
            before = x if constant else None
            norm_linear_triton(x, before, x[0], EPS, weight, **how)  # type: ignore[arg-type]
    for most, outputs, width in ROUTERS:
        for rows in sorted({1, min(most, 64), most}):
            x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
            for form in (PLAIN_ROWS, *FORMS):
                norm_linear_triton(
                    x,
                    x,
                    x[0],
                    EPS,
                    x.new_empty(outputs, width),
                    out_dtype=torch.float32,
                    keep=form,
                    constant=True,
                )


def test_compiled_for_sm_90() -> None:
    """The row and the weights of a program fit into registers."""
    for report in compile_sm90(launches):
        report.check()
        assert report.starts_early and report.reads_ahead == report.constants["AHEAD"], report


def test_all_of_v2_lite_runs_at_a_time() -> None:
    """All programs of the joined projection fit the GPU: none waits for another to end."""
    outputs, width = SHAPES[0]
    report = compile_sm90(launches)[0]
    assert report.constants["INPUTS"] == width and report.constants["AHEAD"]
    at_a_time = 132 * (65536 // (report.registers * 32 * report.num_warps))
    assert outputs // tiling(1, width, outputs)[0] <= at_a_time, report


def test_a_row_of_a_router_is_not_read_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "on_gpu", lambda _: True)
    for rows, outputs, width in ROUTERS:
        assert has_kernel(torch.empty(rows, width, device="meta"), outputs)
        assert not has_kernel(torch.empty(rows + 1, width, device="meta"), outputs)
    row = torch.empty(1, 2048, device="meta")
    assert has_kernel(row, 3648) and not has_kernel(row.expand(2, -1), 3648)
    assert not has_kernel(torch.empty(1, 7168, device="meta"), 2112)
    x, quantized = torch.empty(129, 2048, device="meta"), RowForm(False, torch.float8_e4m3fn)
    assert has_kernel(x, 64) and has_kernel(x[:128], 64, quantized)
    assert not has_kernel(x, 64, quantized)
