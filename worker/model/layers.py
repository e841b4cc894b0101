"""Parts that every architecture is built from, beside its linear layers (`linear.py`)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from mla_router.worker.kernels.norm_linear import has_kernel, norm_linear
from mla_router.worker.kernels.rms_norm import add_rms_norm, rms_norm
from mla_router.worker.kernels.silu_and_mul import silu_and_mul
from mla_router.worker.kernels.weight import Weight
from mla_router.worker.model.linear import Linear, empty_parameter


class Embedding(nn.Module):
    """Rows of weight [vocabulary, width] by token id."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = empty_parameter(vocabulary, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight)

    @property
    def operand(self) -> Weight:
        """The weight as products take it, where it is the head as well."""
        return Weight(self.weight, constant=True)


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
        if projection.bias is None and has_kernel(x, projection.shape.outputs):
            product, total, _ = norm_linear(x, stream, self.weight, self.eps, projection.operand)
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
