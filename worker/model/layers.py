"""Parts that every architecture is built from.

Parameters are allocated uninitialised, in torch's current default dtype and device, and filled by
`weights.py`: drawing random numbers for billions of them first would take longer than loading.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from mla_router.worker.kernels.rms_norm import rms_norm
from mla_router.worker.kernels.silu_and_mul import silu_and_mul


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """x @ weight.T + bias, weight [outputs, inputs]."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(outputs, inputs)
        self.bias = empty_parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class JoinedLinear(Linear):
    """Several projections of the same x in one product; the result is theirs side by side.

    `parts` says, in order, what checkpoints call them and how many outputs each has.
    """

    def __init__(self, inputs: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(inputs, sum(parts.values()), bias=bias)
        self.parts = dict(parts)


class Embedding(nn.Module):
    """Rows of weight [vocabulary, width] by token id."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = empty_parameter(vocabulary, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class MLP(nn.Module):
    """SwiGLU feed-forward layer, gate and up projection in one."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = JoinedLinear(
            hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, bias=bias
        )
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out
