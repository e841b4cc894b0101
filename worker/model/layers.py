"""Parts that every architecture is built from.

Parameters are declared without memory (on torch's meta device), in the current default dtype: which of
them are quantized is decided after the model is put together (`quantization/`), and it may not fit
otherwise. `loader.py` allocates them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from mla_router.worker.kernels.linear import linear
from mla_router.worker.kernels.norm_linear import has_kernel, norm_linear
from mla_router.worker.kernels.rms_norm import add_rms_norm, rms_norm
from mla_router.worker.kernels.silu_and_mul import silu_and_mul


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """x @ weight.T + bias, weight [outputs, inputs].

    `outputs` may also be of several projections of the same x, their results side by side: what
    checkpoints call them and how many outputs each has; `bias` may then name those that have one, and is 0
    for the others. With `experts` it is the weights of that many
    layers, stacked to [experts, outputs, inputs], for `moe_experts` to choose from.
    """

    constant = True  # whether dense_weight() is what was loaded, and not a kernel's result

    def __init__(
        self,
        inputs: int,
        outputs: int | Mapping[str, int],
        *,
        bias: bool | Collection[str] = False,
        experts: int | None = None,
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.parts = {} if isinstance(outputs, int) else dict(outputs)
        self.outputs = outputs if isinstance(outputs, int) else sum(outputs.values())
        self.biased = bias
        self.experts = experts
        stack = () if experts is None else (experts,)
        self.weight = empty_parameter(*stack, self.outputs, inputs)
        self.bias = empty_parameter(*stack, self.outputs) if bias else None

    @property
    def part_sizes(self) -> list[int]:
        """Outputs of each part; of the only one, if it is not joined."""
        return list(self.parts.values()) or [self.outputs]

    def has_bias(self, part: str) -> bool:
        return self.biased if isinstance(self.biased, bool) else part in self.biased

    def dense_weight(self) -> Tensor:
        """The weight in the dtype of the activations, however it is stored."""
        return self.weight

    def rows(self, kind: str, outputs: int) -> int:
        """Rows of the parameter `kind` that belong to so many outputs."""
        del kind
        return outputs

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.dense_weight(), self.bias, constant=self.constant)


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

    def add(self, x: Tensor, stream: Tensor | None) -> tuple[Tensor, Tensor]:
        """x added to the residual `stream`, normalized, and the stream itself."""
        if stream is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, stream, self.weight, self.eps)

    def add_then(
        self, projection: Linear, x: Tensor, stream: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`add`, then the projection of what is normalized instead of that; for one row as one kernel."""
        if projection.bias is None and has_kernel(x, projection.outputs):
            product, total, _ = norm_linear(
                x,
                stream,
                self.weight,
                self.eps,
                projection.dense_weight(),
                constant=projection.constant,
            )
            return product, total
        normed, stream = self.add(x, stream)
        return projection(normed), stream


class FeedForward(nn.Module):
    """What follows the attention in a decoder layer: maps normalized rows [T, hidden_size] to what is
    added to the residual stream."""

    def after(
        self, norm: RMSNorm, update: Tensor, stream: Tensor, locations: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Its result for `norm` of update + stream, and that sum, the stream it is to be added to. Some
        kinds have kernels that begin with the norm. `locations` [T] are `ForwardBatch.out_cache_loc`: rows at
        0 are idle, and a mixture of experts does not route them."""
        del locations
        normed, stream = norm.add(update, stream)
        out: Tensor = self(normed)
        return out, stream


class MLP(FeedForward):
    """SwiGLU feed-forward layer, gate and up projection in one."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = Linear(
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            bias=bias,
        )
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out
