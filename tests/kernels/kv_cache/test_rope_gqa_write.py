"""rope_gqa_write against rotations in the complex plane in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.kernels.kv_cache.rope_gqa_write import (
    rope_gqa_write,
    rope_gqa_write_torch,
    rope_gqa_write_triton,
)
from support.sm90 import compile_sm90
from support.triton_device import DEVICE
from support.turned import turned


def check(
    op: Callable[..., None],
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    plain: int,
    pairs: int,
    v_head_dim: int,
    interleaved: bool,
) -> None:
    """The operands are views of one joined projection, and the cache is full of NaN. If keys have a plain part, all heads
    share the rotated part."""
    draw = torch.Generator().manual_seed(tokens * 100 + heads * 10 + pairs)
    rope = 2 * pairs
    head_dim, shared = plain + rope, 1 if plain else kv_heads
    sizes = [heads * head_dim, kv_heads * plain, shared * rope, kv_heads * v_head_dim]
    joined = torch.randn(tokens, sum(sizes), generator=draw).to(DEVICE)
    before = joined.clone()

    def parts(of: torch.Tensor) -> list[torch.Tensor]:
        q, k, k_pe, v = of.split(sizes, dim=-1)
        return [
            q.view(tokens, heads, head_dim),
            k.view(tokens, kv_heads, plain),
            k_pe.view(tokens, shared, rope).expand(-1, kv_heads, -1),
            v.view(tokens, kv_heads, v_head_dim),
        ]

    angles = (torch.rand(tokens, pairs, generator=draw, dtype=torch.float64) * 6).to(DEVICE)
    rotations = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    row = kv_heads * (head_dim + v_head_dim)
    cache = torch.full((4, 4, row), float("nan"), device=DEVICE)
    out_cache_loc = (4 + torch.randperm(12, generator=draw)[:tokens]).to(DEVICE)
    op(*parts(joined), rotations, cache, out_cache_loc, interleaved=interleaved)

    q, *_ = parts(joined)
    was_q, k, k_pe, v = parts(before)
    assert torch.equal(joined[:, heads * head_dim :], before[:, heads * head_dim :])
    assert torch.equal(q[..., :plain], was_q[..., :plain])
    expected_q = turned(was_q[..., plain:], angles, interleaved=interleaved)
    torch.testing.assert_close(q[..., plain:].double(), expected_q, rtol=1e-5, atol=1e-5)
    keys = torch.cat((k.double(), turned(k_pe, angles, interleaved=interleaved)), dim=-1)
    expected_rows = torch.cat((keys.flatten(1), v.double().flatten(1)), dim=-1)
    rows = cache.view(-1, row)
    torch.testing.assert_close(rows[out_cache_loc].double(), expected_rows, rtol=1e-5, atol=1e-5)
    assert rows.isfinite().all(dim=-1).sum() == tokens


@given(
    tokens=st.integers(1, 5),
    heads=st.integers(1, 4),
    kv_heads=st.integers(1, 4),
    plain=st.integers(0, 5),
    pairs=st.integers(1, 6),
    v_head_dim=st.integers(1, 9),
    interleaved=st.booleans(),
)
def test_formula(
    tokens: int,
    heads: int,
    kv_heads: int,
    plain: int,
    pairs: int,
    v_head_dim: int,
    interleaved: bool,
) -> None:
    check(
        rope_gqa_write,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        plain=plain,
        pairs=pairs,
        v_head_dim=v_head_dim,
        interleaved=interleaved,
    )


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "plain", "pairs", "v_head_dim"),
    [(8, 2, 0, 8, 16), (3, 1, 0, 3, 5), (20, 20, 8, 4, 8), (5, 5, 7, 3, 6)],
)
def test_kernel(
    heads: int, kv_heads: int, plain: int, pairs: int, v_head_dim: int, interleaved: bool
) -> None:
    check(
        rope_gqa_write_triton,
        tokens=5,
        heads=heads,
        kv_heads=kv_heads,
        plain=plain,
        pairs=pairs,
        v_head_dim=v_head_dim,
        interleaved=interleaved,
    )


@pytest.mark.parametrize("interleaved", [True, False])
def test_float16_is_rounded_where_the_torch_function_rounds(interleaved: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    joined = torch.randn(3, 8, 16, generator=draw)
    angles = 6 * torch.rand(3, 8, generator=draw)
    rotations = torch.polar(torch.ones_like(angles), angles).to(DEVICE)
    results = []
    for op in (rope_gqa_write_torch, rope_gqa_write_triton):
        q, k, v = joined.to(DEVICE, torch.float16).split([4, 2, 2], dim=1)
        cache = torch.zeros(1, 4, 64, device=DEVICE)
        out_cache_loc = torch.arange(3, device=DEVICE)
        op(q, k[..., :0], k, v, rotations, cache, out_cache_loc, interleaved=interleaved)
        results.append((q, cache))
    for got, expected in zip(results[1], results[0], strict=True):
        # A fused multiplication and addition may round the other way.
        torch.testing.assert_close(got, expected, rtol=2**-9, atol=1e-3)
        assert (got == expected).float().mean() > 0.98


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(AssertionError, match=r"v \(2, 1, 6\).*cache \(1, 4, 8\)"):
        rope_gqa_write_triton(
            torch.ones(2, 1, 4),
            torch.ones(2, 1, 0),
            torch.ones(2, 1, 4),
            torch.ones(2, 1, 6),
            torch.ones(2, 2, dtype=torch.complex64),
            torch.ones(1, 4, 8),
            torch.arange(2),
            interleaved=True,
        )


def launches() -> None:
    """Launches Llama 3 8B and 3.2 1B on views of a joined projection, V2-Lite without absorption, and both layouts."""
    with torch.device("meta"):
        rest = torch.empty(8, dtype=torch.int64)
        for interleaved in (True, False):
            for head_dim in (128, 64):
                q, k, v = torch.empty(8, 48, head_dim, dtype=torch.bfloat16).split(
                    [32, 8, 8], dim=1
                )
                rope_gqa_write_triton(
                    q,
                    k[..., :0],
                    k,
                    v,
                    torch.empty(8, head_dim // 2, dtype=torch.complex64),
                    torch.empty(9, 64, 16 * head_dim, dtype=torch.bfloat16),
                    rest,
                    interleaved=interleaved,
                )
            q, kv = torch.empty(8, 16 * 192 + 576, dtype=torch.bfloat16).split([3072, 576], dim=-1)
            k, v = torch.empty(8, 16, 256, dtype=torch.bfloat16).split([128, 128], dim=-1)
            rope_gqa_write_triton(
                q.view(8, 16, 192),
                k,
                kv[:, None, 512:].expand(-1, 16, -1),
                v,
                torch.empty(8, 32, dtype=torch.complex64),
                torch.empty(9, 64, 16 * 320, dtype=torch.bfloat16),
                rest,
                interleaved=interleaved,
            )


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
