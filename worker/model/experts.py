"""The routed experts of a mixture."""

from __future__ import annotations

from torch import Tensor, nn

from mla_router.worker.kernels.moe.experts import Plus, moe_experts, takes_shared
from mla_router.worker.kernels.moe.quantized_experts import row_form
from mla_router.worker.kernels.moe.shared import SharedWeights
from mla_router.worker.kernels.weight import Activations, RowForm
from mla_router.worker.model.linear import Linear


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
        hidden_states: Activations,
        weights: Tensor,
        ids: Tensor,
        plus: Plus = None,
    ) -> Tensor:
        """Returns the sum of each token's experts `ids` [T, K], weighted by `weights` [T, K] float32, and of `plus`
        (`moe_experts`)."""
        return moe_experts(
            hidden_states,
            self.gate_up_proj.operand,
            self.down_proj.operand,
            weights,
            ids,
            plus,
            total=self._total,
        )

    @property
    def _total(self) -> int | None:
        """Experts of all ranks."""
        stack = self.gate_up_proj.shape.stack
        return None if stack is None else stack.full

    def row_form(self, hidden_states: Tensor) -> RowForm:
        """Returns the form in which `forward` takes as many rows as `hidden_states` has."""
        gate_up, down = self.gate_up_proj.operand, self.down_proj.operand
        return row_form(hidden_states, gate_up, down, total=self._total)

    def takes(self, shared: SharedWeights, hidden_states: Activations) -> bool:
        """Whether `plus` should be the weights of the shared experts instead of their result."""
        return takes_shared(hidden_states, self.gate_up_proj.operand, shared)
