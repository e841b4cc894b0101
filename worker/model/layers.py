"""Parts of every architecture, in addition to its linear layers (`linear.py`)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.norm_linear import has_kernel, norm_linear
from mla_router.worker.kernels.rms_norm import norm_rows, rms_norm
from mla_router.worker.kernels.silu_and_mul import Activation, gated_rows
from mla_router.worker.kernels.weight import PLAIN_ROWS, Activations, RowForm, Weight
from mla_router.worker.model.exchange import Exchange
from mla_router.worker.model.linear import Linear, empty_parameter
from mla_router.worker.model.shard import Numbers, Shard


class Embedding(nn.Module):
    """Rows of weight [vocab_size, hidden_size] by token id."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight)

    @property
    def operand(self) -> Weight:
        """The weight for products, for a head that is tied to the embedding."""
        return Weight(self.weight, constant=True)


class RMSNorm(nn.Module):
    """Root mean square norm of rows [T, size].

    `group`: ranks that divide the layer before. Its results are then parts, and a norm that adds a residual first sums
    them over the ranks.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps
        self.group = Group.alone()

    def shard(self) -> Shard:
        """Returns the shard of the weight, for a tensor of a checkpoint."""
        return Numbers(self.weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.eps)

    def add(self, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the normalized sum of `hidden_states` of all ranks and `residual`, and the sum. Without a residual the
        sum is `hidden_states`. May overwrite `hidden_states`."""
        if residual is None:
            return rms_norm(hidden_states, self.weight, self.eps), hidden_states
        return self.group.sum_add_norm(hidden_states, residual, self.weight, self.eps)

    # ---- Fast path ----

    def add_and_project(
        self, projection: Linear, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns `projection` of the normalized sum, and the sum: `add`, then `projection`. One row has one kernel
        for both, unless the norm joins the sum over ranks."""
        outputs = projection.shape.outputs
        if projection.bias is None and self.joins_product(hidden_states, residual, outputs):
            projected, total, _ = norm_linear(
                self.sum(hidden_states, residual),
                residual,
                self.weight,
                self.eps,
                projection.operand,
            )
            return projected, total
        rows, total = self.add_for(projection.row_form(hidden_states), hidden_states, residual)
        return projection(rows), total

    def add_for(
        self, form: RowForm, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Activations, Tensor]:
        """Returns `add`, with the normalized rows in the form of the products that take them."""
        if form == PLAIN_ROWS:
            return self.add(hidden_states, residual)
        summed = self.sum(hidden_states, residual)
        return norm_rows(summed, residual, self.weight, self.eps, form)

    def joins_product(
        self,
        hidden_states: Tensor,
        residual: Tensor | None,
        outputs: int,
        keep: RowForm | None = None,
    ) -> bool:
        """Whether one kernel does norm and product, and keeps the normalized rows in the form `keep`. It leaves `sum` to its
        caller."""
        joins_sum = residual is not None and self.group.joins_norm(hidden_states)
        return not joins_sum and has_kernel(hidden_states, outputs, keep)

    def sum(self, hidden_states: Tensor, residual: Tensor | None) -> Tensor:
        """Returns the sum over ranks of the rows that come with a residual."""
        return hidden_states if residual is None else self.group.all_reduce(hidden_states)


class FeedForward(nn.Module):
    """Base of feed-forward layers. `forward` maps normalized rows [T, hidden_size] to rows of the same shape, which
    are to be added to the residual."""

    def after_norm(
        self,
        norm: RMSNorm,
        hidden_states: Tensor,
        residual: Tensor,
        exchange: Exchange,
    ) -> tuple[Tensor, Tensor]:
        """Returns `forward` of the normalized sum of `hidden_states` and `residual`, and the sum.

        A mixture of experts takes part in the `exchange` of the step, and does not route its idle rows.
        """
        del exchange
        rows, residual = norm.add_for(self.row_form(hidden_states), hidden_states, residual)
        out: Tensor = self(rows)
        return out, residual

    def row_form(self, hidden_states: Tensor) -> RowForm:
        """Returns the form in which `forward` takes as many rows as `hidden_states` has."""
        del hidden_states
        return PLAIN_ROWS

    def serve(self, exchange: Exchange) -> None:
        """Does the part of this rank in the `exchange` of a step in which it has no rows."""
        del exchange


class MLP(FeedForward):
    """Gated feed-forward layer: SwiGLU by default. Gate and up projection are one matrix."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: Activation = "silu",
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up_proj = Linear(
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            bias=bias,
        )
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, hidden_states: Activations) -> Tensor:
        gate_up = self.gate_up_proj(hidden_states)
        form = self.down_proj.row_form(gate_up)
        out: Tensor = self.down_proj(gated_rows(gate_up, form, self.activation))
        return out

    def row_form(self, hidden_states: Tensor) -> RowForm:
        return self.gate_up_proj.row_form(hidden_states)
