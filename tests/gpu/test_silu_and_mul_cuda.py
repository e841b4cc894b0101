"""silu_and_mul in bfloat16, at the sizes of V2-Lite and V3."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.silu_and_mul import silu_and_mul
from support.cuda import captured, forbid_waiting

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("width", [1408, 2816, 10944, 18432])
@pytest.mark.parametrize("rows", [0, 1, 33, 2048])
def test_float64(rows: int, width: int) -> None:
    torch.manual_seed(width)
    gate_up = 5 * torch.randn(rows, 2 * width, device="cuda").bfloat16()
    with forbid_waiting():
        got = silu_and_mul(gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(got.double(), expected, rtol=2**-7, atol=1e-30)  # rounded twice


def test_in_a_cuda_graph() -> None:
    gate_up = torch.randn(8, 2816, device="cuda").bfloat16()
    replay, out = captured(lambda: silu_and_mul(gate_up))
    gate_up.copy_(torch.randn_like(gate_up))
    replay()
    assert torch.equal(out, silu_and_mul(gate_up))
