"""The products around MLA's decode attention in bfloat16 at V2-Lite's shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.attention.absorb import absorb_queries, expand_values
from mla_router.worker.kernels.weight import Weight
from support.cuda import captured, forbid_waiting

pytestmark = pytest.mark.gpu


def inputs(tokens: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    q = torch.randn(tokens, heads, 192, device="cuda").bfloat16()[..., :128]
    both = (torch.randn(heads, 256, 512, device="cuda") / 16).bfloat16()
    return q, both[:, :128], both[:, 128:]


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 33, 100, 129])
def test_float64(tokens: int, constant: bool, heads: int) -> None:
    """Our kernels, and the library for more tokens."""
    q, w_uk, w_uv = inputs(tokens, heads)
    out = q.new_empty(tokens, heads, 128)
    with forbid_waiting():
        latent = absorb_queries(q, Weight(w_uk, constant=constant))
        expand_values(latent, Weight(w_uv, constant=constant), out)
    for got, equation, x, weight in (
        (latent, "thd,hdc->thc", q, w_uk),
        (out, "thc,hvc->thv", latent, w_uv),
    ):
        expected = torch.einsum(equation, x.double(), weight.double())
        assert (got.double() - expected).norm() / expected.norm() < 3e-3


def test_chain_in_a_cuda_graph() -> None:
    """Each kernel starts while the kernel before it still runs."""
    q, w_uk, w_uv = inputs(8, 16)

    def chain() -> Tensor:
        x = q
        for _ in range(10):
            latent = absorb_queries(x, Weight(w_uk, constant=True))
            x = q.new_empty(8, 16, 128)
            expand_values(latent, Weight(w_uv, constant=True), x)
        return x

    replay, out = captured(chain)
    w_uk.mul_(0.7)  # after the capture: the graph has no copy of it
    replay()
    x = q
    for _ in range(10):
        latent = torch.einsum("thd,hdc->thc", x.double(), w_uk.double()).bfloat16()
        x = torch.einsum("thc,hvc->thv", latent.double(), w_uv.double()).bfloat16()
    assert (out.double() - x.double()).norm() / x.double().norm() < 2e-2
