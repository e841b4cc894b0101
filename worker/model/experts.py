"""The routed experts of a mixture."""

from __future__ import annotations

from torch import Tensor, nn

from mla_router.worker.kernels.moe.experts import Plus, moe_experts, takes_shared
from mla_router.worker.model.layers import MLP, Linear


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
        plus: Plus = None,
    ) -> Tensor:
        """The sum of each token's experts `ids` [T, K], weighted by `weights` [T, K] float32; and `plus`, as of
        `moe_experts`."""
        return moe_experts(
            hidden, self.gate_up_proj.weight, self.down_proj.weight, weights, ids, plus
        )

    def takes(self, shared: MLP, hidden: Tensor) -> bool:
        """Whether `plus` had better be the weights of these experts for all tokens than their result."""
        constant = shared.gate_up_proj.constant and shared.down_proj.constant
        return constant and takes_shared(hidden, self.gate_up_proj.weight, shared.down_proj.inputs)
