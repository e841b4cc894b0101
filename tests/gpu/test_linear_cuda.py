"""linear in bfloat16 at real shapes, by our kernels and by the library."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.linear import linear
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


def test_in_a_cuda_graph() -> None:
    x = torch.randn(8, 2048, device="cuda").bfloat16()
    weight = torch.randn(3648, 2048, device="cuda").bfloat16()
    replay, out = captured(lambda: linear(x, Weight(weight)))
    x.copy_(torch.randn_like(x))
    replay()
    assert torch.equal(out, linear(x, Weight(weight)))
