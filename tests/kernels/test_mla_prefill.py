"""mla_prefill against attention of each query alone, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_router.worker.kernels.mla_prefill import QUERY_BLOCK, mla_prefill


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, extents: list[tuple[int, int]], scale: float
) -> Tensor:
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    first_query = first_key = 0
    for queries, keys in extents:
        for i in range(queries):
            seen = slice(first_key, first_key + keys - queries + i + 1)
            scores = torch.einsum("hd,shd->hs", q[first_query + i].double(), k[seen].double())
            weights = (scores * scale).softmax(dim=-1)
            out[first_query + i] = torch.einsum("hs,shv->hv", weights, v[seen].double())
        first_query += queries
        first_key += keys
    return out


def drawn(extents: list[tuple[int, int]], heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    queries, keys = (sum(column) for column in zip(*extents, strict=True))
    return (
        torch.randn(queries, heads, 6, generator=draw),
        torch.randn(keys, heads, 6, generator=draw),
        torch.randn(keys, heads, 5, generator=draw),
    )


@settings(deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=3),
    heads=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_formula(chunks: list[tuple[int, int]], heads: int, seed: int) -> None:
    extents = [(length, prefix + length) for length, prefix in chunks]
    q, k, v = drawn(extents, heads, seed)
    got = mla_prefill(q, k, v, extents, scale=0.4)
    expected = one_by_one(q, k, v, extents, 0.4)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_chunk_longer_than_a_query_block() -> None:
    extents = [(2 * QUERY_BLOCK + 17, 2 * QUERY_BLOCK + 40), (3, 3)]
    q, k, v = drawn(extents, 2, seed=0)
    got = mla_prefill(q, k, v, extents, scale=0.4)
    expected = one_by_one(q, k, v, extents, 0.4)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_later_keys_do_not_matter_even_if_they_are_nan() -> None:
    q, k, v = drawn([(5, 9)], 1, seed=1)
    before = mla_prefill(q, k, v, [(5, 9)], scale=1.0)
    k[8] = float("nan")
    assert torch.equal(mla_prefill(q, k, v, [(5, 9)], scale=1.0)[:4], before[:4])


def test_wrong_extents_are_named() -> None:
    q, k, v = drawn([(5, 9)], 1, seed=1)
    with pytest.raises(AssertionError, match=r"q \(5, 1, 6\), k \(9, 1, 6\), extents \[\(4, 9\)\]"):
        mla_prefill(q, k, v, [(4, 9)], scale=1.0)
