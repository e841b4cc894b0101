"""linear in bfloat16 at real shapes, by our kernels and by the library."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.linear import linear, linear_torch
from mla_router.worker.kernels.weight import Weight
from support.cuda import captured, forbid_waiting

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(64, 2048), (3648, 2048), (2048, 2816), (2048, 10944), (256, 7168)]
)
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 64, 500])
def test_float64(rows: int, constant: bool, shape: tuple[int, int], out_dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, shape[1] + 64, device="cuda").bfloat16()[:, 64:]
    weight = torch.randn(shape, device="cuda").bfloat16()
    with forbid_waiting():
        got = linear(x, Weight(weight, constant=constant), out_dtype=out_dtype)
    expected = x.double() @ weight.double().T
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error < (1e-4 if out_dtype == torch.float32 else 2**-8)


# Weights of Hopper's kernel: narrow and wide ones, inputs and outputs that end within a tile
LARGE = [(4096, 4096), (6144, 4096), (4096, 14336), (28672, 3584), (5000, 3368)]


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 31, 64])
def test_large_weights(
    rows: int, constant: bool, shape: tuple[int, int], out_dtype: torch.dtype
) -> None:
    test_float64(rows, constant, shape, out_dtype)


@pytest.mark.parametrize("shape", [(2048, 2048), (2048, 2816), (5632, 2048)], ids=str)
@pytest.mark.parametrize("rows", [9, 16, 33, 64])
def test_smaller_weights(rows: int, shape: tuple[int, int]) -> None:
    test_float64(rows, True, shape, torch.bfloat16)


@pytest.mark.parametrize("shape", [(4096, 14336), (4096, 4096)], ids=str)
@pytest.mark.parametrize("rows", [65, 100, 128])
def test_rows_of_the_library(rows: int, shape: tuple[int, int]) -> None:
    before = torch.backends.cuda.preferred_blas_library()
    test_float64(rows, True, shape, torch.bfloat16)
    assert torch.backends.cuda.preferred_blas_library() == before


@pytest.mark.parametrize("rows", [8, 64])
def test_a_chain_of_large_products_in_a_graph(rows: int) -> None:
    """Each kernel reads its weight while the one before still writes the rows."""
    torch.manual_seed(rows)
    x = torch.randn(rows, 4096, device="cuda").bfloat16()
    weights = [
        Weight(torch.randn(4096, 4096, device="cuda").bfloat16() / 64, constant=True)
        for _ in range(6)
    ]

    def chain() -> Tensor:
        rows = x
        for weight in weights:
            rows = linear(rows, weight)
        return rows

    replay, out = captured(chain)
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        replay()
        expected = x
        for weight in weights:
            expected = linear_torch(expected, weight.values, out_dtype=x.dtype)
        assert (out.double() - expected.double()).norm() / expected.double().norm() < 0.02


def test_in_a_cuda_graph() -> None:
    x = torch.randn(8, 2048, device="cuda").bfloat16()
    weight = torch.randn(3648, 2048, device="cuda").bfloat16()
    replay, out = captured(lambda: linear(x, Weight(weight)))
    x.copy_(torch.randn_like(x))
    replay()
    assert torch.equal(out, linear(x, Weight(weight)))
