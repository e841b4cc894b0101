"""Prefetched memory is what was last written to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels import prefetch
from mla_router.worker.kernels.beside import beside
from mla_router.worker.kernels.linear import linear
from mla_router.worker.kernels.prefetch import prefetch_triton
from support.cuda import captured, forbid_waiting

pytestmark = pytest.mark.gpu


def test_written_after_it_was_fetched() -> None:
    weight = torch.zeros(2048, 2048, dtype=torch.bfloat16, device="cuda")
    for value in range(1, 6):
        with forbid_waiting():
            prefetch_triton(weight, weight.nbytes)
            weight.fill_(value)
            prefetch_triton(weight, weight.nbytes - 8)
        assert (weight == value).all()


@pytest.mark.parametrize("own", [False, True])
def test_in_a_graph_beside_other_work(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a layer has it: fetched on a second stream, on which then the product runs."""
    monkeypatch.setattr(prefetch, "OWN", own)
    monkeypatch.setattr(prefetch, "MAX_AHEAD_BYTES", 20 << 20)
    x = torch.randn(1, 2048, device="cuda").bfloat16()
    weights = [torch.randn(n, 2048, device="cuda").bfloat16() for n in (5632, 3072)]

    def layer() -> Tensor:
        prefetch.prefetch(x, weights)
        y = x * 2
        first = beside(y, lambda y: linear(y, weights[0]))
        second = linear(y, weights[1])
        return torch.cat((first(), second), dim=-1)

    replay, out = captured(layer)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        weights[0].mul_(-1)
        replay()
        expected = torch.cat([2 * x.double() @ weight.double().T for weight in weights], dim=-1)
        assert (out.double() - expected).norm() / expected.norm() < 3e-3
