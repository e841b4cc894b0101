"""gqa_prefill against attention of each query alone, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_router.worker.kernels.gqa_prefill import QUERY_BLOCK, gqa_prefill


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, extents: list[tuple[int, int]], scale: float
) -> Tensor:
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    first_query = first_key = 0
    for queries, keys in extents:
        for i in range(queries):
            seen = slice(first_key, first_key + keys - queries + i + 1)
            for head in range(q.shape[1]):
                group = head * k.shape[1] // q.shape[1]
                scores = k[seen, group].double() @ q[first_query + i, head].double()
                weights = (scores * scale).softmax(dim=-1)
                out[first_query + i, head] = weights @ v[seen, group].double()
        first_query += queries
        first_key += keys
    return out


def drawn(
    extents: list[tuple[int, int]], heads: int, seed: int, *, share: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """`heads` key heads, each of which `share` query heads share."""
    draw = torch.Generator().manual_seed(seed)
    queries, keys = (sum(column) for column in zip(*extents, strict=True))
    return (
        torch.randn(queries, share * heads, 6, generator=draw),
        torch.randn(keys, heads, 6, generator=draw),
        torch.randn(keys, heads, 5, generator=draw),
    )


@settings(deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=3),
    heads=st.integers(1, 3),
    share=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_formula(chunks: list[tuple[int, int]], heads: int, share: int, seed: int) -> None:
    extents = [(length, prefix + length) for length, prefix in chunks]
    q, k, v = drawn(extents, heads, seed, share=share)
    got = gqa_prefill(q, k, v, extents, scale=0.4)
    expected = one_by_one(q, k, v, extents, 0.4)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_chunk_longer_than_a_query_block() -> None:
    extents = [(2 * QUERY_BLOCK + 17, 2 * QUERY_BLOCK + 40), (3, 3)]
    q, k, v = drawn(extents, 2, seed=0, share=2)
    got = gqa_prefill(q, k, v, extents, scale=0.4)
    expected = one_by_one(q, k, v, extents, 0.4)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_later_keys_do_not_matter_even_if_they_are_nan() -> None:
    q, k, v = drawn([(5, 9)], 1, seed=1)
    before = gqa_prefill(q, k, v, [(5, 9)], scale=1.0)
    k[8] = float("nan")
    assert torch.equal(gqa_prefill(q, k, v, [(5, 9)], scale=1.0)[:4], before[:4])


def test_wrong_extents_are_named() -> None:
    q, k, v = drawn([(5, 9)], 1, seed=1)
    with pytest.raises(AssertionError, match=r"q \(5, 1, 6\), k \(9, 1, 6\), extents \[\(4, 9\)\]"):
        gqa_prefill(q, k, v, [(4, 9)], scale=1.0)


def test_query_heads_that_no_key_heads_share_evenly_are_refused() -> None:
    q, k, v = torch.ones(5, 3, 6), torch.ones(9, 2, 6), torch.ones(9, 2, 5)
    with pytest.raises(AssertionError, match=r"q \(5, 3, 6\), k \(9, 2, 6\), v \(9, 2, 5\)"):
        gqa_prefill(q, k, v, [(5, 9)], scale=1.0)
