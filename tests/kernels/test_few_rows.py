"""few_rows_linear against the product in float64, in the interpreter and compiled for sm_90."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.few_rows import (
    MAX_INPUTS,
    MAX_OUTPUTS,
    MAX_ROWS,
    Tiles,
    few_rows_linear,
    tiling,
)
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

# (outputs, inputs): V2-Lite's output projection, joined query and latent projection, and shared experts' way
# down; the largest
SHAPES = [(2048, 2048), (3648, 2048), (2048, 2816), (MAX_OUTPUTS, MAX_INPUTS)]


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("tiles", [None, Tiles(16, 32, 2)])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 1, 16), (2, 37, 64), (5, 64, 40), (8, 16, 130)]
)
def test_the_kernel_is_the_product(
    rows: int, outputs: int, inputs: int, tiles: Tiles | None, constant: bool
) -> None:
    """Blocks that rows, outputs and inputs do not fill; memory around x is NaN."""
    draw = torch.Generator().manual_seed(outputs + inputs)
    wide = torch.full((rows + 2, inputs + 16), float("nan"))
    wide[1:-1, 3 : inputs + 3] = torch.randn(rows, inputs, generator=draw)
    x = wide.to(DEVICE)[1:-1, 3 : inputs + 3]
    weight = torch.randn(outputs, inputs, generator=draw).to(DEVICE)
    got = few_rows_linear(x, weight, out_dtype=torch.float32, constant=constant, tiles=tiles)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_rounded_once() -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(4, 96, generator=draw).to(DEVICE, torch.float16)
    weight = torch.randn(20, 96, generator=draw).to(DEVICE, torch.float16)
    exact = few_rows_linear(x, weight, out_dtype=torch.float32)
    assert torch.equal(few_rows_linear(x, weight, out_dtype=torch.float16), exact.half())


def test_an_error_names_unsupported_operands() -> None:
    with pytest.raises(AssertionError, match=r"weight \(4, 7\)"):
        few_rows_linear(torch.ones(2, 8), torch.ones(4, 7), out_dtype=torch.float32)
    with pytest.raises(AssertionError, match="9 rows of 8"):
        few_rows_linear(torch.ones(9, 8), torch.ones(4, 8), out_dtype=torch.float32)
    with pytest.raises(AssertionError, match="2 rows of 3073"):
        few_rows_linear(torch.ones(2, 3073), torch.ones(4, 3073), out_dtype=torch.float32)


def test_pieces_are_as_deep_as_there_are_inputs() -> None:
    assert tiling(2048).depth == 256 and tiling(300).depth == 128 and tiling(8).depth == 16


def launches() -> None:
    for outputs, inputs in SHAPES:
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
        x = torch.empty(MAX_ROWS, inputs, dtype=torch.bfloat16, device="meta")
        for constant in (True, False):
            few_rows_linear(x, weight, out_dtype=x.dtype, constant=constant)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
        report.check_resident(2)
        assert report.starts_early, report
        assert report.reads_ahead == report.constants["AHEAD"], report
