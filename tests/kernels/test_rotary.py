"""rotary against a rotation matrix per pair in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_router.worker.kernels.rotary import rotary


def turned(x: Tensor, angles: Tensor, *, interleaved: bool) -> Tensor:
    """Pair by pair: (a, b) -> (a cos - b sin, a sin + b cos)."""
    out = x.double().clone()
    half = x.shape[-1] // 2
    for token in range(x.shape[0]):
        for pair in range(half):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
            cos, sin = math.cos(angles[token, pair]), math.sin(angles[token, pair])
            a, b = x[token, ..., first].double(), x[token, ..., second].double()
            out[token, ..., first] = a * cos - b * sin
            out[token, ..., second] = a * sin + b * cos
    return out


@given(
    tokens=st.integers(0, 4),
    heads=st.integers(1, 3),
    pairs=st.integers(1, 6),
    groups=st.integers(1, 2),
    interleaved=st.booleans(),
)
def test_formula(tokens: int, heads: int, groups: int, pairs: int, interleaved: bool) -> None:
    draw = torch.Generator().manual_seed(tokens * 100 + heads * 10 + pairs)
    # Slices of wider tensors, as in the model: not contiguous
    q = torch.randn(tokens, heads, 6 + 2 * pairs, generator=draw)[..., 6:]
    k = torch.randn(tokens, groups, 6 + 2 * pairs, generator=draw)[..., 6:]
    angles = torch.rand(tokens, pairs, generator=draw, dtype=torch.float64) * 6
    rotations = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    got_q, got_k = rotary(q, k, rotations, interleaved=interleaved)
    for got, x in ((got_q, q), (got_k, k)):
        expected = turned(x, angles, interleaved=interleaved)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_dtype_is_kept_and_arithmetic_is_float32() -> None:
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 8, generator=draw).bfloat16()
    rotations = torch.polar(torch.ones(3, 4), torch.rand(3, 4, generator=draw))
    got, _ = rotary(q, q, rotations, interleaved=True)
    exact, _ = rotary(q.float(), q.float(), rotations, interleaved=True)
    assert torch.equal(got, exact.bfloat16())


def test_wrong_shapes_are_named() -> None:
    rotations = torch.ones(2, 4, dtype=torch.complex64)
    with pytest.raises(AssertionError, match=r"k \(2, 1, 6\)"):
        rotary(torch.ones(2, 1, 8), torch.ones(2, 1, 6), rotations, interleaved=True)
