"""moe_experts against each token through each of its experts, in float64: with plain torch, and the
Triton kernels interpreted and compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_router.worker.kernels.moe.combine import Term
from mla_router.worker.kernels.moe.down_gemm import MANY_ROWS
from mla_router.worker.kernels.moe.experts import (
    Plus,
    moe_experts,
    moe_experts_triton,
)
from mla_router.worker.kernels.moe.shared import SharedWeights
from mla_router.worker.kernels.moe.tiling import (
    MoeShape,
    MoeTiling,
    Tile,
    default_tiling,
)
from mla_router.worker.kernels.weight import Weight
from support.corners import corners
from support.sm90 import compile_sm90

# Sizes that do not divide the operands, and one that does
TILINGS = [
    MoeTiling(rows=1, gate_up=Tile(4, 32), down=Tile(8, 16)),
    MoeTiling(rows=16, gate_up=Tile(16, 32, group_m=2), down=Tile(32, 16, group_m=3)),
    MoeTiling(rows=32, gate_up=Tile(32, 16), down=Tile(16, 32, group_m=8)),
]


def plain_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, plus: Plus = None
) -> Tensor:
    """`moe_experts` with the arguments of `moe_experts_triton`."""
    return moe_experts(x, Weight(gate_up), Weight(down), weights, ids, plus)


def shared_experts(gate_up: Tensor, down: Tensor) -> SharedWeights:
    return SharedWeights(Weight(gate_up), Weight(down))


def drawn(
    tokens: int, experts: int, top_k: int, seed: int, hidden: int = 16, width: int = 8
) -> tuple[Tensor, ...]:
    """Returns x, gate_up, down, weights, ids."""
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randperm(experts, generator=draw)[:top_k] for _ in range(tokens)]
    return (
        torch.randn(tokens, hidden, generator=draw),
        torch.randn(experts, 2 * width, hidden, generator=draw) * 0.3,
        torch.randn(experts, hidden, width, generator=draw) * 0.3,
        torch.rand(tokens, top_k, generator=draw),
        torch.stack(ids).int(),
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
        plain_experts(*inputs).double(), one_by_one(*inputs), rtol=1e-4, atol=1e-5
    )


def test_all_tokens_at_one_expert() -> None:
    x, gate_up, down, weights, ids = drawn(40, 6, 1, seed=1)
    inputs = (x, gate_up, down, weights, torch.full_like(ids, 5))
    torch.testing.assert_close(
        plain_experts(*inputs).double(), one_by_one(*inputs), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "width"), [(85, 23), (85, 24), (88, 23), (1, 1)])
def test_any_widths(hidden: int, width: int, dtype: torch.dtype) -> None:
    x, gate_up, down, weights, ids = drawn(9, 4, 2, seed=2, hidden=hidden, width=width)
    inputs = (x.to(dtype), gate_up.to(dtype), down.to(dtype), weights, ids)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(
        plain_experts(*inputs).double(), one_by_one(*inputs), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes(dtype: torch.dtype) -> None:
    x, gate_up, down, weights, ids = drawn(9, 4, 2, seed=2)
    inputs = (x.to(dtype), gate_up.to(dtype), down.to(dtype), weights, ids)
    got = plain_experts(*inputs)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), one_by_one(*inputs), rtol=0.02, atol=0.02)


def test_order_of_a_tokens_experts_does_not_depend_on_the_batch() -> None:
    x, gate_up, down, weights, ids = drawn(7, 5, 3, seed=3)
    together = plain_experts(x, gate_up, down, weights, ids)
    alone = plain_experts(x[4:5], gate_up, down, weights[4:5], ids[4:5])
    torch.testing.assert_close(together[4:5], alone, rtol=1e-5, atol=1e-6)


def test_wrong_shapes_are_named() -> None:
    x, gate_up, down, weights, ids = drawn(2, 3, 1, seed=0)
    with pytest.raises(AssertionError, match=r"down \(3, 8, 16\)"):
        plain_experts(x, gate_up, down.transpose(1, 2), weights, ids)


# A tiling of one row is for few tokens, and slow in the interpreter.
TOKENS_OF_TILINGS = [
    (tiling, tokens)
    for tiling in TILINGS
    for tokens in ([1, 5] if tiling.rows == 1 else [1, 5, 40])
]


@pytest.mark.parametrize(
    ("tiled", "tolerance"),
    corners(TOKENS_OF_TILINGS, [1e-5, 5e-3]),
)
def test_triton(tiled: tuple[MoeTiling, int], tolerance: float) -> None:
    tiling, tokens = tiled
    dtype = torch.float32 if tolerance < 1e-3 else torch.float16
    x, gate_up, down, weights, ids = drawn(tokens, 5, 3, seed=4, hidden=40, width=24)
    inputs = (x.to(dtype), gate_up.to(dtype), down.to(dtype), weights, ids)
    expected = one_by_one(*inputs)
    got = moe_experts_triton(*inputs, tiling=tiling)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item()
    )


@pytest.mark.parametrize(("tokens", "experts"), [(2, 6), (5, 40), (16, 40), (16, 48), (17, 40)])
def test_triton_with_and_without_sorting(tokens: int, experts: int) -> None:
    """Fewer pairs than experts, as many, and more; as many tokens as a block's rows, and one more."""
    inputs = drawn(tokens, experts, 3, seed=8)
    expected = one_by_one(*inputs)
    got = moe_experts_triton(*inputs, tiling=TILINGS[1])
    torch.testing.assert_close(
        got.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item()
    )


@pytest.mark.parametrize(
    ("tiling", "tokens"),
    [(TILINGS[0], 6), *((tiling, tokens) for tiling in TILINGS[1:] for tokens in (9, 40))],
)
def test_triton_keeps_tokens_apart(tiling: MoeTiling, tokens: int) -> None:
    x, gate_up, down, weights, ids = drawn(tokens, 4, 2, seed=5)
    clean = moe_experts_triton(x, gate_up, down, weights, ids, tiling=tiling)
    x[3], weights[5] = float("nan"), float("nan")
    got = moe_experts_triton(x, gate_up, down, weights, ids, tiling=tiling)
    others = [token for token in range(tokens) if token not in (3, 5)]
    assert got[[3, 5]].isnan().all()
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("shares", [0, 2])
@pytest.mark.parametrize(
    ("tiling", "tokens", "experts"),
    [
        (None, 7, 9),
        (TILINGS[0], 2, 9),
        (TILINGS[1], 7, 40),  # fewer pairs than experts
        (TILINGS[1], 7, 9),
        (TILINGS[1], 20, 9),
        (MoeTiling(MANY_ROWS, Tile(16, 32), Tile(16, 16)), 150, 9),
    ],
)
def test_idle_rows_and_experts_of_other_ranks_are_not_read(
    tiling: MoeTiling | None, tokens: int, experts: int, shares: int
) -> None:
    """Idle rows have `plus` alone. They and pairs with experts of other ranks read no routed expert: weights of experts
    that no pair has are NaN, and expert 0 is one of them."""
    x, gate_up, down, weights, ids = drawn(tokens, experts, 3, seed=11, hidden=40, width=24)
    idle = torch.arange(tokens) % 5 == 1
    elsewhere = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)) < 0.4
    elsewhere |= idle[:, None] | (ids == 0)
    ids[elsewhere], weights[elsewhere] = -1, 0.0
    plus = torch.randn(tokens, 40, generator=torch.Generator().manual_seed(7))
    expected = plus.double()
    expected[~idle] += one_by_one(x[~idle], gate_up, down, weights[~idle], ids[~idle])
    unread = sorted(set(range(experts)) - set(ids.flatten().tolist()))
    gate_up[unread], down[unread] = float("nan"), float("nan")
    added: Plus = lambda: Term(plus)
    if shares:
        if tiling and not takes_shared_experts(tiling, tokens):
            return
        draw = torch.Generator().manual_seed(9)
        added = shared_experts(
            torch.randn(2 * shares * 24, 40, generator=draw) * 0.3,
            torch.randn(40, shares * 24, generator=draw) * 0.3,
        )
        everybodys = torch.ones(tokens, 1), torch.zeros(tokens, 1, dtype=torch.int32)
        expected += (
            one_by_one(x, added.gate_up.values[None], added.down.values[None], *everybodys) - plus
        )
    inputs = (x, gate_up, down, weights, ids, added)
    got = moe_experts_triton(*inputs, tiling=tiling) if tiling else plain_experts(*inputs)
    torch.testing.assert_close(
        got.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item()
    )


@pytest.mark.parametrize("tiling", [None, *TILINGS[:2]], ids=["torch", "rows1", "rows16"])
def test_plus_is_added(tiling: MoeTiling | None) -> None:
    inputs = drawn(5, 4, 2, seed=6, hidden=40, width=24)
    plus = Term(torch.randn(2, 40, generator=torch.Generator().manual_seed(7)), first=1)
    if tiling is None:
        got = plain_experts(*inputs, lambda: plus)
    else:
        got = moe_experts_triton(*inputs, lambda: plus, tiling=tiling)
    expected = one_by_one(*inputs)
    expected[1:3] += plus.rows
    torch.testing.assert_close(
        got.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item()
    )


def takes_shared_experts(tiling: MoeTiling | None, tokens: int) -> bool:
    """Sorted pairs need more tokens than rows of a block; unsorted pairs are for very few tokens."""
    if tiling is None:
        return True
    return tokens <= 3 if tiling.rows == 1 else tokens > tiling.rows


SHARED_CASES = [
    (tiling, tokens)
    for tiling in [None, *TILINGS, MoeTiling(1, Tile(2, 64), Tile(2, 8))]
    for tokens in [1, 3, 17, 40]
    if takes_shared_experts(tiling, tokens)
]


@pytest.mark.parametrize(("tiled", "shares"), corners(SHARED_CASES, [1, 2, 3]))
def test_shared_experts_are_added(tiled: tuple[MoeTiling | None, int], shares: int) -> None:
    tiling, tokens = tiled
    inputs = drawn(tokens, 4, 2, seed=8, hidden=40, width=24)
    draw = torch.Generator().manual_seed(9)
    gate_up = torch.randn(2 * shares * 24, 40, generator=draw) * 0.3
    shared = shared_experts(gate_up, torch.randn(40, shares * 24, generator=draw) * 0.3)
    if tiling is None:
        got = plain_experts(*inputs, shared)
    else:
        got = moe_experts_triton(*inputs, shared, tiling=tiling)
    everybodys = torch.ones(tokens, 1), torch.zeros(tokens, 1, dtype=torch.int32)
    expected = one_by_one(*inputs) + one_by_one(
        inputs[0], shared.gate_up.values[None], shared.down.values[None], *everybodys
    )
    torch.testing.assert_close(
        got.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item()
    )


@pytest.mark.parametrize("shares", [0, 2])
def test_many_rows(shares: int) -> None:
    """Blocks with so many rows that programs take tile after tile; all tokens go to one expert, which has two blocks."""
    x, gate_up, down, weights, ids = drawn(150, 4, 2, seed=10, hidden=40, width=24)
    ids[:, 0], ids[:, 1] = 3, torch.where(ids[:, 1] == 3, 1, ids[:, 1])
    inputs = (x, gate_up, down, weights, ids)
    tiling = MoeTiling(MANY_ROWS, Tile(16, 32, group_m=2), Tile(16, 16, group_m=2))
    expected = one_by_one(*inputs)
    shared = None
    if shares:
        draw = torch.Generator().manual_seed(9)
        double = torch.randn(2 * shares * 24, 40, generator=draw) * 0.3
        shared = shared_experts(double, torch.randn(40, shares * 24, generator=draw) * 0.3)
        everybodys = torch.ones(150, 1), torch.zeros(150, 1, dtype=torch.int32)
        expected += one_by_one(
            x, shared.gate_up.values[None], shared.down.values[None], *everybodys
        )
    got = moe_experts_triton(*inputs, shared, tiling=tiling)
    torch.testing.assert_close(
        got.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item()
    )


def test_shared_experts_are_not_for_pairs_that_a_block_finds() -> None:
    inputs = drawn(5, 4, 2, seed=8)
    shared = shared_experts(torch.ones(16, 16), torch.ones(16, 8))
    with pytest.raises(AssertionError, match="shared experts with"):
        moe_experts_triton(*inputs, shared, tiling=TILINGS[1])


V2_LITE = MoeShape(experts=64, hidden=2048, width=1408, dtype=torch.bfloat16)
V3 = MoeShape(experts=256, hidden=7168, width=2048, dtype=torch.bfloat16)


def launch(shape: MoeShape, top_k: int, tokens: int, tiling: MoeTiling, *, shares: int = 0) -> None:
    """Launches with so many shared experts, or with another term if there are none."""

    def meta(*sizes: int, dtype: torch.dtype = shape.dtype) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    shared = shared_experts(
        meta(2 * shares * shape.width, shape.hidden), meta(shape.hidden, shares * shape.width)
    )
    moe_experts_triton(
        meta(tokens, shape.hidden),
        meta(shape.experts, 2 * shape.width, shape.hidden),
        meta(shape.experts, shape.hidden, shape.width),
        meta(tokens, top_k, dtype=torch.float32),
        meta(tokens, top_k, dtype=torch.int32),
        shared if shares else lambda: Term(meta(tokens, shape.hidden)),
        tiling=tiling,
    )


def launches_with_shared() -> None:
    for shape, top_k, shares, counts in (
        (V2_LITE, 6, 2, (1, 128, 300, 1024, 2048)),
        (V3, 8, 1, (1, 8192)),
    ):
        for tokens in counts:
            launch(shape, top_k, tokens, default_tiling(shape, tokens, top_k), shares=shares)


def test_shared_experts_compiled_for_sm_90() -> None:
    """With one token their weights are read before the routed experts are known."""
    for report in compile_sm90(launches_with_shared):
        report.check()
        if "gemv" in report.kernel:
            assert report.starts_early and report.reads_ahead, report


def launches() -> None:
    for shape, top_k, counts in (
        (V2_LITE, 6, (1, 2, 8, 32, 300, 512, 8192)),
        (V3, 8, (1, 2, 8, 32, 8192)),
    ):
        for tokens in counts:
            launch(shape, top_k, tokens, default_tiling(shape, tokens, top_k))


def test_compiled_for_sm_90() -> None:
    reports = compile_sm90(launches)
    for report in reports:
        report.check()
    assert any(report.has_wgmma for report in reports)
