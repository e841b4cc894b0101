"""The routed experts of a mixture."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mla_router.worker.kernels.moe.experts import moe_experts
from mla_router.worker.model.layers import Linear


class Experts(nn.Module):
    """SwiGLU feed-forward layers, their weights stacked."""

    def __init__(self, hidden_size: int, intermediate_size: int, count: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            experts=count,
        )
        self.down_proj = Linear(intermediate_size, hidden_size, experts=count)

    def forward(
        self,
        hidden: Tensor,
        weights: Tensor,
        ids: Tensor,
        plus: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """The sum of each token's experts `ids` [T, K], weighted by `weights` [T, K] float32; and
        plus(), which is called last."""
        gate_up, down = self.gate_up_proj.dense_weight(), self.down_proj.dense_weight()
        return moe_experts(hidden, gate_up, down, weights, ids, plus)
