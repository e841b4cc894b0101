"""moe_experts against each token through each of its experts, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_router.worker.kernels.moe_experts import moe_experts


def drawn(tokens: int, experts: int, top_k: int, seed: int) -> tuple[Tensor, ...]:
    """x, gate_up, down, weights, ids with hidden size 16 and expert width 8."""
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randperm(experts, generator=draw)[:top_k] for _ in range(tokens)]
    return (
        torch.randn(tokens, 16, generator=draw),
        torch.randn(experts, 16, 16, generator=draw) * 0.3,
        torch.randn(experts, 16, 8, generator=draw) * 0.3,
        torch.rand(tokens, top_k, generator=draw),
        torch.stack(ids),
    )


def one_by_one(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ row).chunk(2)
            out[token] += weight * (down[expert].double() @ (gate / (1 + (-gate).exp()) * up))
    return out


@settings(deadline=None)
@given(
    tokens=st.integers(1, 9),
    experts=st.integers(1, 12),
    top_k=st.integers(1, 4),
    seed=st.integers(0, 100),
)
def test_formula(tokens: int, experts: int, top_k: int, seed: int) -> None:
    inputs = drawn(tokens, experts, min(top_k, experts), seed)
    torch.testing.assert_close(
        moe_experts(*inputs).double(), one_by_one(*inputs), rtol=1e-4, atol=1e-5
    )


def test_all_tokens_at_one_expert() -> None:
    x, gate_up, down, weights, ids = drawn(40, 6, 1, seed=1)
    inputs = (x, gate_up, down, weights, torch.full_like(ids, 5))
    torch.testing.assert_close(
        moe_experts(*inputs).double(), one_by_one(*inputs), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes(dtype: torch.dtype) -> None:
    x, gate_up, down, weights, ids = drawn(9, 4, 2, seed=2)
    inputs = (x.to(dtype), gate_up.to(dtype), down.to(dtype), weights, ids)
    got = moe_experts(*inputs)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), one_by_one(*inputs), rtol=0.02, atol=0.02)


def test_order_of_a_tokens_experts_does_not_depend_on_the_batch() -> None:
    x, gate_up, down, weights, ids = drawn(7, 5, 3, seed=3)
    together = moe_experts(x, gate_up, down, weights, ids)
    alone = moe_experts(x[4:5], gate_up, down, weights[4:5], ids[4:5])
    torch.testing.assert_close(together[4:5], alone, rtol=1e-5, atol=1e-6)


def test_wrong_shapes_are_named() -> None:
    x, gate_up, down, weights, ids = drawn(2, 3, 1, seed=0)
    with pytest.raises(AssertionError, match=r"down \(3, 8, 16\)"):
        moe_experts(x, gate_up, down.transpose(1, 2), weights, ids)
