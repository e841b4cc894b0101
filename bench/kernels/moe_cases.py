"""The cases of the MoE benches: two published shapes, random weights and routing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from kernels.timing import floor_us, time_graph_us
from torch import Tensor

from mla_router.worker.kernels.moe.routing import RoutingRule, moe_routing
from mla_router.worker.kernels.moe.tiling import MoeShape


@dataclass(frozen=True)
class MoeModel:
    name: str
    experts: int
    hidden: int
    width: int
    routing: RoutingRule

    @property
    def shape(self) -> MoeShape:
        return MoeShape(self.experts, self.hidden, self.width, torch.bfloat16)

    @property
    def top_k(self) -> int:
        return self.routing.top_k


MODELS = {
    model.name: model
    for model in (
        MoeModel("v2-lite", 64, 2048, 1408, RoutingRule(6, "softmax")),
        MoeModel(
            "v3",
            256,
            7168,
            2048,
            RoutingRule(8, "sigmoid", num_groups=8, top_groups=4, normalize=True, scale=2.5),
        ),
    )
}


@dataclass(frozen=True)
class Case:
    x: Tensor
    logits: Tensor
    weights: Tensor
    ids: Tensor
    experts_hit: int


def random_layers(model: MoeModel) -> list[tuple[Tensor, Tensor]]:
    """gate_up [E, 2I, N] and down [E, N, I], N(0, 0.02), of three layers."""
    shape = model.shape
    total, hidden, width = shape.experts, shape.hidden, shape.width

    def drawn(*sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=shape.dtype, device="cuda").normal_(std=0.02)

    return [(drawn(total, 2 * width, hidden), drawn(total, hidden, width)) for _ in range(3)]


def time_layers_us(
    layers: list[tuple[Tensor, Tensor]], op: Callable[[Tensor, Tensor], object]
) -> float:
    """Returns the time of one op(gate_up, down) in a CUDA graph over all layers in turn: as in a decode step, without
    launch gaps and without weights in L2."""

    def step() -> None:
        for gate_up, down in layers:
            op(gate_up, down)

    return time_graph_us(step, launches=4) / len(layers)


def random_case(model: MoeModel, tokens: int) -> Case:
    """Draws logits that are independent for each token and expert, so that all experts are equally likely."""
    draw = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, model.hidden, generator=draw, device="cuda").to(model.shape.dtype)
    logits = torch.randn(tokens, model.experts, generator=draw, device="cuda")
    weights, ids = route(model, logits)
    return Case(x, logits, weights, ids, len(ids.unique()))


def route(model: MoeModel, logits: Tensor) -> tuple[Tensor, Tensor]:
    return moe_routing(logits, model.routing)


def floors_us(model: MoeModel, case: Case) -> tuple[float, float]:
    """Returns the floors of gate_up and of down: one read of the weights of all used experts, or the products."""
    pairs = case.ids.numel()
    one = model.hidden * model.width

    def floor(matrices: int) -> float:
        return floor_us(
            moved_bytes=case.experts_hit * matrices * one * 2, flops=2.0 * pairs * matrices * one
        )

    return floor(2), floor(1)
