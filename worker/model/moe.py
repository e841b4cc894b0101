"""Fine-grained mixture of experts (DeepSeek-V3, arXiv:2412.19437): a few routed experts for each token, and shared
ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mla_router.worker.kernels.beside import Fork
from mla_router.worker.kernels.comm.all_to_all import Choice, ExpertTables
from mla_router.worker.kernels.linear import linear
from mla_router.worker.kernels.moe.combine import Term
from mla_router.worker.kernels.moe.experts import Plus
from mla_router.worker.kernels.moe.routing import RoutingRule, moe_routing
from mla_router.worker.kernels.moe.shared import SharedWeights
from mla_router.worker.kernels.norm_linear import norm_linear
from mla_router.worker.kernels.quantize import no_rows
from mla_router.worker.kernels.weight import PLAIN_ROWS, Activations, Quantized, RowForm, Weight
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.exchange import Exchange, Way
from mla_router.worker.model.experts import Experts
from mla_router.worker.model.layers import MLP, FeedForward, RMSNorm
from mla_router.worker.model.linear import empty_parameter


class MixtureOfExperts(FeedForward):
    """A few routed experts for each token, and shared experts for all tokens."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config.hidden_size, config.moe_intermediate_size, config.num_experts)
        self.shared_experts = (
            MLP(config.hidden_size, config.num_shared_experts * config.moe_intermediate_size)
            if config.num_shared_experts
            else None
        )

    def forward(self, hidden_states: Activations, out_cache_loc: Tensor | None = None) -> Tensor:
        shared = self.shared(hidden_states)
        weights, ids = self.gate(hidden_states, out_cache_loc)
        out: Tensor = self.experts(hidden_states, weights, ids, shared)
        return out

    def serve(self, exchange: Exchange) -> None:
        if not exchange.is_needed:
            return
        none = self.gate.weight.new_empty(0, self.gate.weight.shape[1])
        form = self.form_of_all(exchange)
        way = self.way(none, form, exchange)
        is_plain = way is Way.GATHER or form.quantized is None
        self.forward_exchanged(none if is_plain else no_rows(none, form), way, exchange)

    def forward_exchanged(self, rows: Activations, way: Way, exchange: Exchange) -> Tensor:
        """Returns `forward` of own rows, with the routed experts of all DP ranks."""
        if way is Way.DISPATCH:
            return self._forward_dispatched(rows, exchange)
        if isinstance(rows, Quantized):
            return self._forward_gathered_quantized(rows, exchange)
        return self._forward_gathered(rows, exchange)

    def _forward_gathered(self, rows: Tensor, exchange: Exchange) -> Tensor:
        fork = Fork(rows)
        rows_of_all = exchange.gather(rows)
        shared = self.shared_of_own(fork, rows, exchange)
        weights, ids = self.gate(rows_of_all, exchange.out_cache_loc)
        return exchange.scatter(self.experts(rows_of_all, weights, ids, shared))

    def _forward_gathered_quantized(self, rows: Quantized, exchange: Exchange) -> Tensor:
        """The gate takes rows that are not rounded, on their own rank."""
        logits = self.gate.logits(rows)
        fork = Fork(rows)
        rows_of_all, logits = exchange.gather_quantized(rows, logits)
        shared = self.shared_of_own(fork, rows, exchange)
        weights, ids = self.gate.choose(logits, exchange.out_cache_loc)
        return exchange.scatter(self.experts(rows_of_all, weights, ids, shared))

    def _forward_dispatched(self, rows: Activations, exchange: Exchange) -> Tensor:
        logits = self.gate.logits(rows)
        fork = Fork(rows)
        choice, experts = self.gate.choose_of_own(logits, exchange.own_cache_loc)
        sent = exchange.dispatch(rows, choice, experts)
        shared = self.shared_of_own(fork, rows, exchange)
        return exchange.combine(self.experts(sent.rows, sent.weights, sent.ids, shared), sent)

    def way(self, rows: Tensor, form: RowForm, exchange: Exchange) -> Way:
        """Returns the way of own rows [T, hidden_size] to the routed experts, which take them in `form`."""
        gate = self.gate
        if gate.reaches is not None and exchange.dispatches(rows, gate.rule.top_k):
            return Way.DISPATCH
        quantized = exchange.sends_quantized(rows, form)
        return Way.GATHER_QUANTIZED if quantized else Way.GATHER

    def shared(self, hidden_states: Activations) -> Plus:
        """Starts the shared experts on a second stream, or returns their weights for the routed experts' kernels."""
        layer = self.shared_experts
        if layer is None:
            return None
        weights = SharedWeights(layer.gate_up_proj.operand, layer.down_proj.operand)
        if self.experts.takes(weights, hidden_states):
            return weights
        rows = Fork(hidden_states).start(layer)
        return lambda: Term(rows())

    def shared_of_own(
        self, fork: Fork, hidden_states: Activations, exchange: Exchange
    ) -> Callable[[], Term] | None:
        """Starts the shared experts of own rows on a second stream, from `fork` on. Their results are added to this rank's
        results for these rows alone, so the sum over the ranks has them once."""
        if self.shared_experts is None or not hidden_states.shape[0]:
            return None
        rows = fork.start(self.shared_experts)
        return lambda: Term(rows(), exchange.first)

    # ---- Fast path ----

    def after_norm(
        self,
        norm: RMSNorm,
        hidden_states: Tensor,
        residual: Tensor,
        exchange: Exchange,
    ) -> tuple[Tensor, Tensor]:
        """The norm and the gate's product are one kernel for few rows, if there is no other DP rank."""
        if exchange.is_needed:
            return self.exchanged_after_norm(norm, hidden_states, residual, exchange)
        form = self.row_form(hidden_states)
        if not self.gate.joins_norm(norm, form, hidden_states, residual):
            rows, residual = norm.add_for(form | PLAIN_ROWS, hidden_states, residual)
            return self(rows, exchange.out_cache_loc), residual
        rows, residual, logits = self.gate.after_norm(norm, form, hidden_states, residual)
        # Before the choice of experts, which leaves most of a GPU idle
        shared = self.shared(rows)
        weights, ids = self.gate.choose(logits, exchange.out_cache_loc)
        return self.experts(rows, weights, ids, shared), residual

    def exchanged_after_norm(
        self, norm: RMSNorm, hidden_states: Tensor, residual: Tensor, exchange: Exchange
    ) -> tuple[Tensor, Tensor]:
        form = self.form_of_all(exchange)
        way = self.way(hidden_states, form, exchange)
        kept = PLAIN_ROWS if way is Way.GATHER else form | PLAIN_ROWS
        rows, residual = norm.add_for(kept, hidden_states, residual)
        return self.forward_exchanged(rows, way, exchange), residual

    def form_of_all(self, exchange: Exchange) -> RowForm:
        """Returns the form in which the routed experts take the rows of all ranks of `exchange`."""
        return self.experts.row_form(self.gate.weight[:1].expand(sum(exchange.counts), -1))

    def row_form(self, hidden_states: Tensor) -> RowForm:
        """Returns the form in which the experts take rows. The gate takes plain ones."""
        form = self.experts.row_form(hidden_states)
        shared = self.shared_experts
        return form if shared is None else form | shared.row_form(hidden_states)


class Gate(nn.Module):
    """Chooses experts by scores in float32, for any dtype of the model, because near ties must not flip."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.rule = RoutingRule(
            top_k=config.experts_per_token,
            scoring=config.scoring,
            num_groups=config.num_expert_groups,
            top_groups=config.top_expert_groups,
            normalize=config.normalize_expert_weights,
            scale=config.routed_scaling_factor,
        )
        self.weight = empty_parameter(config.num_experts, config.hidden_size)
        self.e_score_correction_bias = (
            empty_parameter(config.num_experts, dtype=torch.float32)
            if config.selection_bias
            else None
        )
        # Arguments of `moe_routing`: `table` on a rank with some of the experts, `counts` if their load is counted
        self.table: Tensor | None
        self.counts: Tensor | None
        # `ExpertTables.reaches`, if rows are sent to the ranks of their experts alone
        self.reaches: Tensor | None
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("reaches", None, persistent=False)
        self.register_buffer("counts", None, persistent=False)

    def forward(
        self, hidden_states: Activations, out_cache_loc: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns weights [T, K] float32 and expert ids [T, K] int32; -1 for idle rows, those whose `out_cache_loc`
        is 0."""
        return self.choose(self.logits(hidden_states), out_cache_loc)

    def logits(self, hidden_states: Activations) -> Tensor:
        """Returns the scores [T, E] float32 to `choose` by."""
        if not hidden_states.shape[0]:  # of a DP rank that serves others
            return self.weight.new_empty(0, len(self.weight), dtype=torch.float32)
        return linear(hidden_states, self.operand, out_dtype=torch.float32)

    def choose(self, logits: Tensor, out_cache_loc: Tensor | None) -> tuple[Tensor, Tensor]:
        return moe_routing(
            logits,
            self.rule,
            self.e_score_correction_bias,
            out_cache_loc,
            table=self.table,
            counts=self.counts,
        )

    def choose_of_own(
        self, logits: Tensor, out_cache_loc: Tensor | None
    ) -> tuple[Choice, ExpertTables]:
        """`choose` of own rows, among the experts of all ranks, and the places of these."""
        assert self.table is not None and self.reaches is not None, "experts of one rank"
        choice = moe_routing(logits, self.rule, self.e_score_correction_bias, out_cache_loc)
        return Choice(*choice), ExpertTables(self.table, self.reaches, self.counts)

    @property
    def operand(self) -> Weight:
        """The weight for products. Checkpoints do not quantize it."""
        return Weight(self.weight, constant=True)

    # ---- Fast path ----

    def joins_norm(
        self, norm: RMSNorm, form: RowForm, hidden_states: Tensor, residual: Tensor
    ) -> bool:
        """Whether `after_norm` is one kernel. If not, the norm and `forward` have fast kernels of their own."""
        return norm.joins_product(hidden_states, residual, len(self.weight), form)

    def after_norm(
        self, norm: RMSNorm, form: RowForm, hidden_states: Tensor, residual: Tensor
    ) -> tuple[Activations, Tensor, Tensor]:
        """Returns the normalized sum of `hidden_states` and `residual` in `form`, the sum, and the logits to `choose`
        by."""
        logits, total, normed = norm_linear(
            norm.sum(hidden_states, residual),
            residual,
            norm.weight,
            norm.eps,
            self.operand,
            out_dtype=torch.float32,
            keep=form,
        )
        assert normed is not None
        return normed, total, logits
