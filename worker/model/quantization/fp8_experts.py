"""Routed experts whose weights stay FP8 in memory."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from mla_router.worker.kernels.moe.experts import moe_experts, weighted_sum
from mla_router.worker.kernels.silu_and_mul import silu_and_mul
from mla_router.worker.model.layers import MLP
from mla_router.worker.model.quantization.fp8 import Fp8Linear


class Fp8Experts(nn.Module):
    """Takes the place of `Experts` whose two projections are FP8.

    On a CPU only those that a token was routed to are dequantized, and one at a time: all of a layer's
    would take most of the time of a small step, and tens of gigabytes in DeepSeek-V3.
    """

    def __init__(self, gate_up_proj: Fp8Linear, down_proj: Fp8Linear) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(
        self,
        hidden: Tensor,
        weights: Tensor,
        ids: Tensor,
        plus: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """As of `Experts`."""
        if hidden.device.type != "cpu":  # to ask which experts are needed would wait for the device
            gate_up, down = self.gate_up_proj.dense_weight(), self.down_proj.dense_weight()
            return moe_experts(hidden, gate_up, down, weights, ids, plus)
        each = hidden.new_zeros(*ids.shape, hidden.shape[-1])  # [T, K, hidden_size]
        for expert in ids[ids >= 0].bincount().nonzero().flatten().tolist():
            at = (ids == expert).nonzero(as_tuple=True)
            gate_up = functional.linear(hidden[at[0]], self.gate_up_proj.dense_expert(expert))
            each[at] = functional.linear(silu_and_mul(gate_up), self.down_proj.dense_expert(expert))
        return weighted_sum(each, weights, plus)

    def takes(self, shared: MLP, hidden: Tensor) -> bool:
        del shared, hidden
        return False
