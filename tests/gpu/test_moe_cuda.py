"""Kernels of mixtures of experts on a GPU: real shapes in bfloat16, against float64 and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.beside import Fork
from mla_router.worker.kernels.moe.align import moe_align
from mla_router.worker.kernels.moe.combine import Term
from mla_router.worker.kernels.moe.experts import (
    Plus,
    moe_experts,
    moe_experts_torch,
    takes_shared,
)
from mla_router.worker.kernels.moe.routing import RoutingRule, moe_routing, moe_routing_torch
from mla_router.worker.kernels.moe.shared import SharedWeights
from mla_router.worker.kernels.weight import Weight
from support.cuda import captured, forbid_waiting

pytestmark = pytest.mark.gpu

# DeepSeek-V2-Lite's shape
EXPERTS, TOP_K, HIDDEN, WIDTH = 64, 6, 2048, 1408
ROUTING = RoutingRule(TOP_K, "softmax")


@pytest.fixture(scope="module")
def experts() -> tuple[Tensor, Tensor]:
    draw = torch.Generator("cuda").manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return (torch.randn(*sizes, generator=draw, device="cuda") * 0.02).bfloat16()

    return drawn(EXPERTS, 2 * WIDTH, HIDDEN), drawn(EXPERTS, HIDDEN, WIDTH)


def routed(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, weights, ids."""
    draw = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=draw, device="cuda").bfloat16()
    logits = torch.randn(tokens, EXPERTS, generator=draw, device="cuda")
    weights, ids = moe_routing(logits, ROUTING)
    return x, weights, ids


def through_experts(
    x: Tensor, experts: tuple[Tensor, Tensor], weights: Tensor, ids: Tensor, plus: Plus = None
) -> Tensor:
    gate_up, down = (Weight(weight, constant=True) for weight in experts)
    return moe_experts(x, gate_up, down, weights, ids, plus)


def in_float64(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(len(gate_up)):
        token, k = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ gate_up[expert].double().T).chunk(2, dim=-1)
        row = (torch.nn.functional.silu(gate) * up) @ down[expert].double().T
        out.index_add_(0, token, row * weights[token, k].double()[:, None])
    return out


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 31, 32, 100, 128, 300, 1024, 4097])
def test_experts(tokens: int, experts: tuple[Tensor, Tensor]) -> None:
    x, weights, ids = routed(tokens)
    expected = in_float64(x, *experts, weights, ids)
    got = through_experts(x, experts, weights, ids).double()
    error = (got - expected).norm() / expected.norm()
    # Roundings to 8 bits: of the gated activation, of each expert's row and of the sum
    assert error < 4e-3, error
    reference = moe_experts_torch(x, *experts, weights, ids).double()
    assert error < 1.1 * (reference - expected).norm() / expected.norm()


@pytest.mark.parametrize("tokens", [1, 32])
def test_plus_is_added(tokens: int, experts: tuple[Tensor, Tensor]) -> None:
    x, weights, ids = routed(tokens)
    plus = 2 * x
    expected = in_float64(x, *experts, weights, ids) + plus.double()
    got = through_experts(x, experts, weights, ids, lambda: Term(plus)).double()
    assert (got - expected).norm() < 4e-3 * expected.norm()


def shared_weights(experts: tuple[Tensor, Tensor]) -> SharedWeights:
    """Returns two of the routed experts as shared experts."""
    gate_up, down = experts
    gates, ups = gate_up[:2].unflatten(1, (2, WIDTH)).transpose(0, 1).flatten(1, 2)
    both = torch.cat((gates, ups)), torch.cat((down[0], down[1]), dim=1)
    return SharedWeights(*(Weight(weight, constant=True) for weight in both))


@pytest.mark.parametrize("tokens", [1, 321, 1024, 1536])
def test_shared_experts_along(tokens: int, experts: tuple[Tensor, Tensor]) -> None:
    """The result is that of tokens routed to them as well, in a chain of kernels that start early."""
    x, weights, ids = routed(tokens)
    shared = shared_weights(experts)
    assert takes_shared(x, Weight(experts[0], constant=True), shared)
    rows = x
    for _ in range(5):
        with forbid_waiting():
            got = through_experts(rows, experts, weights, ids, shared)
        expected = in_float64(rows, *experts, weights, ids)
        expected += in_float64(
            rows,
            *experts,
            torch.ones(tokens, 2, device="cuda"),
            ids.new_tensor([[0, 1]]).expand(tokens, 2),
        )
        assert (got.double() - expected).norm() < 4e-3 * expected.norm()
        rows = got


def test_shared_experts_in_a_cuda_graph(experts: tuple[Tensor, Tensor]) -> None:
    first, weights, ids = routed(1)
    shared = shared_weights(experts)

    def chain() -> Tensor:
        rows = first
        for _ in range(10):
            rows = first + through_experts(rows / 4, experts, weights, ids, shared)
        return rows

    replay, out = captured(chain)
    for _ in range(3):
        first.copy_(torch.randn_like(first))
        replay()
        expected = first
        for _ in range(10):
            expected = first + through_experts(expected / 4, experts, weights, ids, shared)
            torch.cuda.synchronize()
        assert out.isfinite().all() and torch.equal(out, expected)


@pytest.mark.parametrize("tokens", [2, 8, 32, 1024])
def test_tokens_stay_apart(tokens: int, experts: tuple[Tensor, Tensor]) -> None:
    x, weights, ids = routed(tokens)
    clean = through_experts(x, experts, weights, ids)
    x[1] = float("nan")
    got = through_experts(x, experts, weights, ids)
    assert got[1].isnan().all()
    others = torch.arange(tokens) != 1
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("tokens", [1, 8, 128, 2048])
def test_captured_and_replayed_with_other_routing(
    tokens: int, experts: tuple[Tensor, Tensor]
) -> None:
    draw = torch.Generator("cuda").manual_seed(2)
    x = torch.randn(tokens, HIDDEN, generator=draw, device="cuda").bfloat16()
    logits = torch.randn(tokens, EXPERTS, generator=draw, device="cuda")

    def step() -> Tensor:
        sines = Fork(x).start(torch.sin)
        weights, ids = moe_routing(logits, ROUTING)
        return through_experts(x, experts, weights, ids, lambda: Term(sines()))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        x.copy_(torch.randn(x.shape, generator=draw, device="cuda"))
        logits.copy_(torch.randn(logits.shape, generator=draw, device="cuda") * 3)
        with forbid_waiting():
            graph.replay()
            expected = step()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("tokens", [1, 77, 4096])
def test_a_rank_routes_and_counts_in_a_graph(tokens: int) -> None:
    """Experts 16 to 31 are here, and expert 17 in every second row only."""
    draw = torch.Generator("cuda").manual_seed(3)
    logits = torch.zeros(tokens, EXPERTS, device="cuda")
    table = torch.full((EXPERTS, 2), -1, dtype=torch.int32, device="cuda")
    table[16:32] = torch.arange(16, dtype=torch.int32, device="cuda")[:, None]
    table[17, 1] = -1
    counts = torch.zeros(EXPERTS, dtype=torch.int64, device="cuda")
    out_cache_loc = torch.arange(tokens, device="cuda") % 5

    def step() -> tuple[Tensor, Tensor]:
        return moe_routing(logits, ROUTING, None, out_cache_loc, table=table, counts=counts)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids = step()
    counts.zero_()
    expected = torch.zeros_like(counts)
    for _ in range(3):
        logits.copy_(torch.randn(logits.shape, generator=draw, device="cuda") * 3)
        with forbid_waiting():
            graph.replay()
        all_weights, everywhere = moe_routing(logits, ROUTING, None, out_cache_loc)
        expected += everywhere[everywhere >= 0].bincount(minlength=EXPERTS)
        row = torch.arange(tokens, device="cuda")[:, None]
        here = torch.where(everywhere < 0, -1, table[everywhere.clamp(min=0).long(), row % 2])
        assert torch.equal(ids, here)
        assert torch.equal(weights, torch.where(here < 0, 0.0, all_weights))
    assert torch.equal(counts, expected)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_pairs_of_other_ranks_read_no_weights(tokens: int, experts: tuple[Tensor, Tensor]) -> None:
    x, weights, ids = routed(tokens)
    ids[:, 1:], weights[:, 1:] = -1, 0.0
    expected = through_experts(x, experts, weights[:, :1].contiguous(), ids[:, :1].contiguous())
    unread = [expert for expert in range(EXPERTS) if expert not in ids]
    poisoned = tuple(weight.clone() for weight in experts)
    for weight in poisoned:
        weight[unread] = float("nan")
    got = through_experts(x, (poisoned[0], poisoned[1]), weights, ids)
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


@pytest.mark.parametrize("tokens", [1, 3, 128, 512, 513, 8192])
@pytest.mark.parametrize("rows", [16, 128])
def test_blocks(tokens: int, rows: int) -> None:
    _, _, ids = routed(tokens)
    blocks = moe_align(ids, EXPERTS, rows)
    order = ids.flatten().sort(stable=True).indices
    assert blocks.count is not None and blocks.experts is not None and blocks.pairs is not None
    count = blocks.count.item()
    used = blocks.pairs[: count * rows]
    real = used < ids.numel()
    assert torch.equal(used[real].long(), order)
    owner = blocks.experts[:count].repeat_interleave(rows)
    assert torch.equal(owner[real], ids.flatten()[order])
    assert count == sum(-(-n // rows) for n in torch.bincount(ids.flatten()).tolist())


@pytest.mark.parametrize("tokens", [1, 77, 4096])
@pytest.mark.parametrize("model", ["v2-lite", "v2", "v3"])
def test_routing(tokens: int, model: str) -> None:
    draw = torch.Generator("cuda").manual_seed(3)
    experts = {"v2-lite": 64, "v2": 160, "v3": 256}[model]
    logits = torch.randn(tokens, experts, generator=draw, device="cuda") * 2
    bias = torch.randn(experts, generator=draw, device="cuda") * 0.1
    rule = {
        "v2-lite": ROUTING,
        "v2": RoutingRule(6, "softmax", num_groups=8, top_groups=3, scale=16.0),
        "v3": RoutingRule(8, "sigmoid", num_groups=8, top_groups=4, normalize=True, scale=2.5),
    }[model]
    own = bias if rule.scoring == "sigmoid" else None
    weights, ids = moe_routing(logits, rule, own)
    expected = moe_routing_torch(logits.double(), rule, own)

    def dense(weights: Tensor, ids: Tensor) -> Tensor:
        zeros = torch.zeros(tokens, experts, dtype=torch.float64, device="cuda")
        return zeros.scatter_(1, ids.long(), weights.double())

    got, wanted = dense(weights, ids), dense(*expected)
    same = ((got > 0) == (wanted > 0)).all(dim=1)
    assert same.float().mean() > 0.999  # near ties may go either way
    torch.testing.assert_close(got[same], wanted[same], rtol=1e-5, atol=1e-7)
