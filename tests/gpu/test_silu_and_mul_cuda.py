"""silu_and_mul in bfloat16, at the sizes of V2-Lite and V3."""

from __future__ import annotations

import math

import pytest
import torch

from mla_router.worker.kernels.silu_and_mul import gated_rows, silu_and_mul
from mla_router.worker.kernels.weight import PLAIN_ROWS, dense_rows
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


@pytest.mark.parametrize("rows", [1, 33, 2048])
def test_gelu_in_float64(rows: int) -> None:
    """At the size of Gemma 2 9B."""
    torch.manual_seed(rows)
    gate_up = 3 * torch.randn(rows, 2 * 14336, device="cuda").bfloat16()
    with forbid_waiting():
        got = dense_rows(gated_rows(gate_up, PLAIN_ROWS, "gelu_tanh"))
    gate, up = gate_up.double().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    expected = 0.5 * gate * (1 + inner.tanh()) * up
    torch.testing.assert_close(got.double(), expected, rtol=2**-7, atol=1e-4)


def test_in_a_cuda_graph() -> None:
    gate_up = torch.randn(8, 2816, device="cuda").bfloat16()
    replay, out = captured(lambda: silu_and_mul(gate_up))
    gate_up.copy_(torch.randn_like(gate_up))
    replay()
    assert torch.equal(out, silu_and_mul(gate_up))
