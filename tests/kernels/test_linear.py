"""linear against the product in float64, the kernel in the interpreter and compiled for sm_90."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.linear import is_ours, linear, linear_triton
from mla_router.worker.kernels.weight import Weight
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

# (outputs, inputs): V2-Lite's output projection, joined query and latent projection, shared
# experts and dense layer; V3's
SHAPES = [
    (2048, 2048),
    (3648, 2048),
    (5632, 2048),
    (2048, 2816),
    (21888, 2048),
    (2048, 10944),
    (2112, 7168),
    (24576, 1536),
    (7168, 16384),
    (102_400, 2048),  # V2-Lite's head
]


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_formula(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(5, 40, generator=draw).to(dtype)
    weight = torch.randn(7, 40, generator=draw).to(dtype)
    got = linear(x, Weight(weight), out_dtype=out_dtype)
    assert got.dtype == (out_dtype or dtype)
    expected = x.double() @ weight.double().T
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), expected, rtol=8 * eps, atol=40 * eps)


def test_bias() -> None:
    draw = torch.Generator().manual_seed(3)
    x, weight, bias = (torch.randn(*shape, generator=draw) for shape in ((3, 4), (5, 4), (5,)))
    torch.testing.assert_close(linear(x, Weight(weight), bias), x @ weight.T + bias)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (37, 64), (64, 40), (16, 130)])
def test_the_kernel_is_the_product(outputs: int, inputs: int, constant: bool) -> None:
    """Blocks that outputs and inputs do not fill; memory around x is NaN."""
    draw = torch.Generator().manual_seed(outputs + inputs)
    wide = torch.full((2, inputs + 16), float("nan"))
    wide[0, :inputs] = torch.randn(inputs, generator=draw)
    x = wide.to(DEVICE)[:1, :inputs]
    weight = torch.randn(outputs, inputs, generator=draw).to(DEVICE)
    got = linear_triton(x, weight, out_dtype=torch.float32, constant=constant, tiles=(4, 64, 4))
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_wide_heads_of_many_inputs_are_the_library_s() -> None:
    assert not is_ours(129_280, 7168) and not is_ours(128_256, 4096)


def test_shapes_are_named() -> None:
    with pytest.raises(AssertionError, match=r"weight \(4, 7\)"):
        linear_triton(torch.ones(1, 8), torch.ones(4, 7), out_dtype=torch.float32)
    with pytest.raises(AssertionError, match="2 rows"):
        linear_triton(torch.ones(2, 8), torch.ones(4, 8), out_dtype=torch.float32)


def launches() -> None:
    for outputs, inputs in SHAPES:
        assert is_ours(outputs, inputs)
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
        x = torch.empty(1, inputs, dtype=torch.bfloat16, device="meta")
        for constant in (True, False):
            linear_triton(x, weight, out_dtype=x.dtype, constant=constant)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
        assert report.reads_ahead == report.constants["AHEAD"], report
