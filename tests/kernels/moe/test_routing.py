"""moe_routing against a plain reading of the three published rules: with plain torch, and the Triton
kernel interpreted and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.kernels.moe.routing import (
    RoutingRule,
    moe_routing,
    moe_routing_torch,
    moe_routing_triton,
)
from support.examples import examples
from support.sm90 import compile_sm90

Route = Callable[..., tuple[torch.Tensor, torch.Tensor]]

both = pytest.mark.parametrize("route", [moe_routing_torch, moe_routing_triton])


def chosen(
    logits: np.ndarray, bias: np.ndarray | None, *, top_k: int, groups: int, top_groups: int
) -> dict[int, float]:
    """Returns the scores of a token's experts before normalisation, in float64."""
    if bias is None:
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        choice, best_of_group = scores, 1
    else:
        scores = 1 / (1 + np.exp(-logits))
        choice, best_of_group = scores + bias, 2
    size = len(logits) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    merit = [sum(sorted(choice[list(m)])[-best_of_group:]) for m in members]
    kept = sorted(range(groups), key=lambda g: -merit[g])[:top_groups]
    reachable = [expert for g in kept for expert in members[g]]
    best = sorted(reachable, key=lambda expert: -choice[expert])[:top_k]
    return {expert: float(scores[expert]) for expert in best}


@both
@examples(40)
@given(
    sigmoid=st.booleans(),
    groups=st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 3), (4, 4), (8, 3)]),
    top_k=st.integers(1, 4),
    normalize=st.booleans(),
    scale=st.sampled_from([1.0, 2.5, 16.0]),
    seed=st.integers(0, 1000),
)
def test_rules(
    route: Route,
    sigmoid: bool,
    groups: tuple[int, int],
    top_k: int,
    normalize: bool,
    scale: float,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 24, generator=draw) * 2
    bias = torch.randn(24, generator=draw) * 0.3 if sigmoid else None
    rule = RoutingRule(top_k, "sigmoid" if sigmoid else "softmax", *groups, normalize, scale)
    weights, ids = route(logits, rule, bias)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    for token in range(len(logits)):
        expected = chosen(
            logits[token].double().numpy(),
            None if bias is None else bias.double().numpy(),
            top_k=top_k,
            groups=groups[0],
            top_groups=groups[1],
        )
        total = sum(expected.values()) if normalize else 1.0
        got = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        assert got.keys() == expected.keys()
        for expert, score in expected.items():
            assert got[expert] == pytest.approx(score / total * scale, rel=1e-5)


@both
def test_bias_moves_the_choice_and_not_the_weights(route: Route) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    bias = torch.tensor([10.0, 0.0, 0.0, 0.0])
    weights, ids = route(logits, RoutingRule(1, "sigmoid"), bias)
    assert ids.tolist() == [[0]]
    assert weights.tolist() == [[0.5]]


@both
@pytest.mark.parametrize(("first", "count"), [(0, 12), (12, 12), (6, 6)])
def test_experts_of_other_ranks_are_dropped(route: Route, first: int, count: int) -> None:
    """Weights are normalized over all experts of a token."""
    logits = torch.randn(9, 24, generator=torch.Generator().manual_seed(0))
    rule = RoutingRule(3, "sigmoid", num_groups=4, top_groups=2, normalize=True)
    out_cache_loc = torch.tensor([70, 0, *range(64, 71)])
    all_weights, all_ids = route(logits, rule, None, out_cache_loc)
    own = torch.full((24, 1), -1, dtype=torch.int32)
    own[first : first + count, 0] = torch.arange(count)
    weights, ids = route(logits, rule, None, out_cache_loc, table=own)
    is_own = (first <= all_ids) & (all_ids < first + count)
    assert is_own.any() and not is_own.all()
    assert torch.equal(ids, torch.where(is_own, all_ids - first, -1))
    assert torch.equal(weights, torch.where(is_own, all_weights, 0.0))


@both
def test_a_row_decides_between_replicas(route: Route) -> None:
    """Expert 5 has three: in rows 0, 3, 6 the one at 2, in rows 1, 4, 7 one of another rank, in others the one at 7."""
    logits = torch.zeros(8, 24)
    logits[:, 5] = 9.0
    table = torch.full((24, 3), -1, dtype=torch.int32)
    table[5] = torch.tensor([2, -1, 7])
    weights, ids = route(logits, RoutingRule(1, "softmax"), table=table)
    assert ids.flatten().tolist() == [2, -1, 7, 2, -1, 7, 2, -1]
    assert (weights == 0).flatten().tolist() == [False, True, False] * 2 + [False, True]


@both
def test_pairs_are_counted(route: Route) -> None:
    """Pairs of idle rows are not counted. Pairs that another rank computes are counted."""
    logits = torch.randn(70, 24, generator=torch.Generator().manual_seed(0))
    rule = RoutingRule(3, "sigmoid", num_groups=4, top_groups=2)
    out_cache_loc = torch.arange(70) % 7
    counts = torch.arange(24) * 10
    nobodys = torch.full((24, 1), -1, dtype=torch.int32)
    route(logits, rule, None, out_cache_loc, table=nobodys, counts=counts)
    expected = list(range(0, 240, 10))
    for token in range(70):
        if token % 7:
            bias = np.zeros(24)
            for expert in chosen(logits[token].numpy(), bias, top_k=3, groups=4, top_groups=2):
                expected[expert] += 1
    assert counts.dtype == torch.int64
    assert counts.tolist() == expected


@both
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_idle_rows_get_no_expert(route: Route, scoring: Any) -> None:
    logits = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    rule = RoutingRule(3, scoring, num_groups=4, top_groups=2, normalize=True)
    out_cache_loc = torch.tensor([70, 0, 64, 0, 1])
    weights, ids = route(logits, rule, None, out_cache_loc)
    everywhere_weights, everywhere_ids = route(logits, rule)
    busy, idle = [0, 2, 4], [1, 3]
    assert torch.equal(ids[busy], everywhere_ids[busy])
    assert torch.equal(weights[busy], everywhere_weights[busy])
    assert (ids[idle] == -1).all() and (weights[idle] == 0).all()


def test_impossible_choice_is_named() -> None:
    with pytest.raises(AssertionError, match="5 of 8 experts in 1 of 2 groups"):
        moe_routing(torch.ones(1, 8), RoutingRule(5, "softmax", num_groups=2, top_groups=1))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_token_that_is_lost_still_has_distinct_experts(scoring: Any) -> None:
    logits = torch.randn(3, 32)
    logits[1] = float("nan")
    rule = RoutingRule(4, scoring, num_groups=4, top_groups=2, normalize=True)
    _, ids = moe_routing_triton(logits, rule)
    assert all(len(set(row)) == 4 and set(row) <= set(range(32)) for row in ids.tolist())


def launches() -> None:
    def logits(experts: int) -> torch.Tensor:
        return torch.empty(7, experts, device="meta")

    out_cache_loc = torch.empty(7, dtype=torch.int64, device="meta")
    moe_routing_triton(logits(64), RoutingRule(6, "softmax"))
    moe_routing_triton(logits(64), RoutingRule(6, "softmax"), None, out_cache_loc)
    v2 = RoutingRule(6, "softmax", num_groups=8, top_groups=3, scale=16.0)
    moe_routing_triton(logits(160), v2)
    v3 = RoutingRule(8, "sigmoid", num_groups=8, top_groups=4, normalize=True, scale=2.5)
    moe_routing_triton(logits(256), v3, logits(256)[0])
    # A rank that has some of the experts, and counts
    counts = torch.empty(256, dtype=torch.int64, device="meta")
    table = torch.empty(256, 6, dtype=torch.int32, device="meta")
    bias = logits(256)[0]
    moe_routing_triton(logits(256), v3, bias, out_cache_loc, table=table, counts=counts)
    moe_routing_triton(logits(256), v3, bias, table=table, counts=counts)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
