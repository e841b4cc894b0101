"""rope_kv_write against rotations in the complex plane and RMSNorm in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.kernels.kv_cache.rope_kv_write import (
    rope_kv_write,
    rope_kv_write_torch,
    rope_kv_write_triton,
)
from support.sm90 import compile_sm90
from support.triton_device import DEVICE
from support.turned import turned

EPS = 1e-6


def check(
    op: object,
    *,
    tokens: int,
    heads: int,
    latent: int,
    pairs: int,
    interleaved: bool,
    in_place: bool,
) -> None:
    """The operands are views of one joined projection, and the cache is full of NaN."""
    assert callable(op)
    draw = torch.Generator().manual_seed(tokens * 100 + heads * 10 + pairs)
    nope, rope = 5, 2 * pairs
    joined = torch.randn(tokens, heads * (nope + rope) + latent + rope, generator=draw).to(DEVICE)
    before = joined.clone()
    flat_q, kv = torch.split(joined, [heads * (nope + rope), latent + rope], dim=-1)
    q = flat_q.view(tokens, heads, nope + rope)
    weight = torch.randn(latent, generator=draw).to(DEVICE)
    angles = (torch.rand(tokens, pairs, generator=draw, dtype=torch.float64) * 6).to(DEVICE)
    rotations = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    cache = torch.full((4, 4, latent + rope), float("nan"), device=DEVICE)
    out_cache_loc = (4 + torch.randperm(12, generator=draw)[:tokens]).to(DEVICE)
    op(
        q,
        kv,
        weight,
        EPS,
        rotations,
        cache,
        out_cache_loc,
        interleaved=interleaved,
        in_place=in_place,
    )

    was_q, was_kv = torch.split(before, [heads * (nope + rope), latent + rope], dim=-1)
    was = was_q.view(tokens, heads, nope + rope)
    assert torch.equal(q[..., :nope], was[..., :nope])
    expected_q = turned(was[..., nope:], angles, interleaved=interleaved)
    torch.testing.assert_close(q[..., nope:].double(), expected_q, rtol=1e-5, atol=1e-5)
    wide = was_kv[:, :latent].double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    k_pe = turned(was_kv[:, None, latent:], angles, interleaved=interleaved)[:, 0]
    rows = cache.view(-1, latent + rope)
    expected_rows = torch.cat((normed, k_pe), dim=-1)
    torch.testing.assert_close(rows[out_cache_loc].double(), expected_rows, rtol=1e-5, atol=1e-5)
    assert torch.equal(kv, rows[out_cache_loc] if in_place else was_kv)
    assert rows.isfinite().all(dim=-1).sum() == tokens


@given(
    tokens=st.integers(0, 5),
    heads=st.integers(1, 4),
    latent=st.integers(1, 20),
    pairs=st.integers(1, 6),
    interleaved=st.booleans(),
    in_place=st.booleans(),
)
def test_formula(
    tokens: int, heads: int, latent: int, pairs: int, interleaved: bool, in_place: bool
) -> None:
    check(
        rope_kv_write,
        tokens=tokens,
        heads=heads,
        latent=latent,
        pairs=pairs,
        interleaved=interleaved,
        in_place=in_place,
    )


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "latent", "pairs"), [(0, 1, 4, 1), (3, 1, 7, 3), (5, 20, 24, 4)]
)
def test_kernel(
    tokens: int, heads: int, latent: int, pairs: int, interleaved: bool, in_place: bool
) -> None:
    check(
        rope_kv_write_triton,
        tokens=tokens,
        heads=heads,
        latent=latent,
        pairs=pairs,
        interleaved=interleaved,
        in_place=in_place,
    )


@pytest.mark.parametrize("interleaved", [True, False])
def test_float16_is_rounded_where_the_torch_function_rounds(interleaved: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    q, kv = torch.randn(3, 4, 24, generator=draw), torch.randn(3, 48, generator=draw)
    weight = torch.randn(32, generator=draw)
    angles = 6 * torch.rand(3, 8, generator=draw)
    rotations = torch.polar(torch.ones_like(angles), angles).to(DEVICE)
    results = []
    for op in (rope_kv_write_torch, rope_kv_write_triton):
        own_q, own_kv, own_weight = (x.to(DEVICE, torch.float16) for x in (q, kv, weight))
        cache = torch.zeros(1, 4, 48, device=DEVICE)
        op(
            own_q,
            own_kv,
            own_weight,
            EPS,
            rotations,
            cache,
            torch.arange(3, device=DEVICE),
            interleaved=interleaved,
        )
        results.append((own_q, cache))
    for got, expected in zip(results[1], results[0], strict=True):
        # A sum of squares in another order may round the other way.
        torch.testing.assert_close(got, expected, rtol=2**-9, atol=1e-6)
        assert (got == expected).float().mean() > 0.98


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(AssertionError, match=r"kv \(2, 9\).*cache \(1, 4, 8\)"):
        rope_kv_write_triton(
            torch.ones(2, 1, 6),
            torch.ones(2, 9),
            torch.ones(5),
            EPS,
            torch.ones(2, 2, dtype=torch.complex64),
            torch.ones(1, 4, 8),
            torch.arange(2),
            interleaved=True,
        )


def launches() -> None:
    """Launches V2-Lite and V3 on views of a joined projection, and the other layout."""
    with torch.device("meta"):
        for heads in (16, 128):
            joined = torch.empty(8, heads * 192 + 576, dtype=torch.bfloat16)
            q, kv = torch.split(joined, [heads * 192, 576], dim=-1)
            for interleaved in (True, False):
                rope_kv_write_triton(
                    q.view(8, heads, 192),
                    kv,
                    torch.empty(512, dtype=torch.bfloat16),
                    EPS,
                    torch.empty(8, 32, dtype=torch.complex64),
                    torch.empty(9, 64, 576, dtype=torch.bfloat16),
                    torch.empty(8, dtype=torch.int64),
                    interleaved=interleaved,
                )


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
