"""The DeepSeek family, top-down: V2, V2-Lite, Coder-V2, V2.5, V3, R1 and models of the same architecture.

Multi-head latent attention (MLA) and fine-grained mixtures of experts (DeepSeek-V2,
arXiv:2405.04434; DeepSeek-V3, arXiv:2412.19437). The input is a flat run of tokens: first one
token of each decoding request, then chunks of prompts (`batch.py`). Other modules decide on checkpoint, device,
dtype and kernels.

Attributes have the names of the checkpoints, so that `weight_mapping.py` needs few rules.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mla_router.worker.kernels.attention.absorb import absorb_queries, expand_values
from mla_router.worker.kernels.attention.absorb_quantized import StaticFP8, takes_heads
from mla_router.worker.kernels.attention.expand_rows import expand_rows
from mla_router.worker.kernels.attention.rope_absorb import rope_absorb
from mla_router.worker.kernels.beside import beside
from mla_router.worker.kernels.kv_cache.fp8 import FORMATS
from mla_router.worker.kernels.kv_cache.rope_gqa_write import rope_gqa_write
from mla_router.worker.kernels.kv_cache.rope_kv_write import rope_kv_write
from mla_router.worker.kernels.linear import linear
from mla_router.worker.kernels.moe.experts import Plus
from mla_router.worker.kernels.moe.routing import RoutingRule, moe_routing
from mla_router.worker.kernels.moe.shared import SharedWeights
from mla_router.worker.kernels.norm_linear import norm_linear
from mla_router.worker.kernels.quantize import no_rows
from mla_router.worker.kernels.weight import PLAIN_ROWS, Activations, Quantized, RowForm, Weight
from mla_router.worker.model.batch import ForwardBatch, Rows
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.decoder import AttentionLayer, Decoder, DecoderLayer
from mla_router.worker.model.exchange import Exchange
from mla_router.worker.model.experts import Experts
from mla_router.worker.model.layers import MLP, FeedForward, RMSNorm
from mla_router.worker.model.linear import Linear, empty_parameter
from mla_router.worker.model.rope import rotation_table

# The norms of the two latents do not use the config's rms_norm_eps: checkpoints were trained with the default of
# DeepSeek's RMSNorm.
LATENT_NORM_EPS = 1e-6

KV_A = "kv_a_proj_with_mqa"


class DeepseekForCausalLM(CausalLM):
    def __init__(self, config: DeepseekConfig) -> None:
        layers = (deepseek_layer(config, index) for index in range(config.num_layers))
        rotations = rotation_table(config.rope, config.max_position_embeddings)
        super().__init__(config, Decoder(config, layers, rotations))


def deepseek_layer(config: DeepseekConfig, index: int) -> DecoderLayer:
    return DecoderLayer(config, latent_attention(config, index), feed_forward(config, index))


def latent_attention(config: DeepseekConfig, index: int) -> LatentAttention:
    kind = NonAbsorbedAttention if config.disable_mla else LatentAttention
    return kind(config, index)


def feed_forward(config: DeepseekConfig, index: int) -> FeedForward:
    """Returns the feed-forward layer: the first layers are dense, and all of them in a model without experts."""
    if index < config.num_dense_layers or not config.num_experts:
        return MLP(config.hidden_size, config.intermediate_size)
    return MixtureOfExperts(config)


class LatentAttention(AttentionLayer):
    """MLA: the cache keeps one latent per token, from which keys and values of all heads are computed."""

    def __init__(self, config: DeepseekConfig, index: int) -> None:
        super().__init__()
        self.attention_index = config.attention_index(index)
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.v_head_dim = config.v_head_dim
        self.q_lora_rank = config.q_lora_rank
        self.kv_lora_rank = config.kv_lora_rank
        self.interleaved = config.rope.interleaved
        self.keeps_bmm_quantized = config.mla_bmm_dtype != "auto"
        self.bmm_dtype = FORMATS.get(config.mla_bmm_dtype)
        queries, hidden = config.num_heads * config.qk_head_dim, config.hidden_size

        # Queries (or their latent) and the latent of keys and values: one matrix
        bias = config.attention_bias
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        if config.q_lora_rank is None:
            self.qkv_proj = Linear(
                hidden,
                {"q_proj": queries, KV_A: latent},
                bias=(KV_A,) if bias else False,
            )
        else:
            self.qkv_proj = Linear(
                hidden, {"q_a_proj": config.q_lora_rank, KV_A: latent}, bias=bias
            )
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, queries)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(
            config.kv_lora_rank,
            config.num_heads * (config.qk_nope_head_dim + config.v_head_dim),
            keeps_quantized=self.absorbs_quantized,
        )
        self.o_proj = Linear(config.num_heads * config.v_head_dim, hidden, bias=bias)

    def forward(self, qkv: Tensor, rotations: Tensor, batch: ForwardBatch, cache: Tensor) -> Tensor:
        q, kv = self.queries_and_latents(qkv)
        if batch.is_decode:
            rows = self.write_and_decode(q, kv, rotations, batch, cache)
        else:
            out = q.new_empty(*q.shape[:2], self.v_head_dim)
            self.write(q, kv, rotations, batch, cache)
            batch.attend(self.attend, (q, kv), cache, out)
            rows = out.flatten(1)
        projected: Tensor = self.o_proj(rows)
        return projected

    def queries_and_latents(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Returns q [T, H, nope + rope], and kv [T, kv_lora_rank + rope], which all heads share."""
        q, kv = torch.split(qkv, list(self.qkv_proj.shape.parts), dim=-1)
        if self.q_lora_rank is not None:
            q, _ = self.q_a_layernorm.add_and_project(self.q_b_proj, q, None)
        return torch.unflatten(q, 1, (-1, self.qk_nope_head_dim + self.qk_rope_head_dim)), kv

    def write(
        self, q: Tensor, kv: Tensor, rotations: Tensor, batch: ForwardBatch, cache: Tensor
    ) -> None:
        """Rotates `q` and `kv` and normalizes the latents in place, and writes `kv` to the cache: later tokens need no
        more of a token."""
        rope_kv_write(
            q,
            kv,
            self.kv_a_layernorm.weight,
            self.kv_a_layernorm.eps,
            rotations,
            cache,
            batch.out_cache_loc,
            interleaved=self.interleaved,
            in_place=True,
            kv_scale=self.scales_of(cache).keys,
        )

    def attend(self, batch: ForwardBatch, rows: Rows, cache: Tensor, out: Tensor) -> None:
        q, kv = rows
        decodes = batch.num_decodes
        if decodes:
            self.decode(batch, q[:decodes], cache, out[:decodes])
        if decodes < len(q):
            self.prefill(batch, q[decodes:], kv[decodes:], cache, out[decodes:])

    def prefill(
        self, batch: ForwardBatch, q: Tensor, kv: Tensor, cache: Tensor, out: Tensor
    ) -> None:
        """Multi-head attention over keys and values of all heads, which are computed from the latents."""
        batch.attention[self.attention_index].mla_prefill(
            q,
            kv,
            cache,
            self.keys_and_values,
            out,
            kv_lora_rank=self.kv_lora_rank,
            scales=self.scales_of(cache),
        )

    def keys_and_values(self, latent: Tensor) -> Tensor:
        """Returns keys and values [S, H, nope + v] of latents [S, kv_lora_rank]."""
        expanded: Tensor = self.kv_b_proj(latent)
        return torch.unflatten(expanded, 1, (-1, self.qk_nope_head_dim + self.v_head_dim))

    def decode(self, batch: ForwardBatch, q: Tensor, cache: Tensor, out: Tensor) -> None:
        """Absorbed multi-query attention over the latents themselves."""
        w_uk, w_uv = self.up_projections()
        q_latent = absorb_queries(q[..., : self.qk_nope_head_dim], w_uk, self.rounding())
        latent = self.decode_latents(batch, q_latent, q, cache)
        expand_values(latent, w_uv, out, self.rounding_of_latents())

    def decode_latents(
        self, batch: ForwardBatch, q_latent: Tensor, q: Tensor, cache: Tensor
    ) -> Tensor:
        q_pe = q[..., self.qk_nope_head_dim :]
        return batch.attention[self.attention_index].mla_decode(
            q_latent, q_pe, cache, scales=self.scales_of(cache)
        )

    def rounding(self, scale: float = 1.0) -> StaticFP8 | None:
        """Returns the FP8 format of the activations in products with w_uk and w_uv (--mla-bmm-dtype)."""
        return None if self.bmm_dtype is None else StaticFP8(self.bmm_dtype, scale)

    def rounding_of_latents(self) -> StaticFP8 | None:
        """Attended latents are averages of cached ones: these have the scale of the cache's rows."""
        return self.rounding(self.kv_scales.keys)

    def absorbs_quantized(self, weight: Weight, dtype: torch.dtype) -> bool:
        """Whether kv_b_proj stays quantized: it was asked for, and decode has kernels for its halves, head by head."""
        rows = self.qk_nope_head_dim, self.v_head_dim
        return self.keeps_bmm_quantized and takes_heads(weight, dtype, rows=rows)

    def up_projections(self) -> tuple[Weight, Weight]:
        """Returns w_uk [H, nope, kv_lora_rank] and w_uv [H, v, kv_lora_rank], halves of kv_b_proj."""
        rows = self.qk_nope_head_dim, self.v_head_dim
        w_uk, w_uv = self.kv_b_proj.operand.split_heads(rows)
        return w_uk, w_uv

    # ---- Fast path ----

    def write_and_decode(
        self,
        q: Tensor,
        kv: Tensor,
        rotations: Tensor,
        batch: ForwardBatch,
        cache: Tensor,
    ) -> Activations:
        """Returns the rows for `o_proj`: `write` and `decode` of the same rows. One kernel writes and absorbs the queries."""
        w_uk, w_uv = self.up_projections()
        q_latent = rope_absorb(
            q,
            kv,
            self.kv_a_layernorm.weight,
            self.kv_a_layernorm.eps,
            rotations,
            cache,
            batch.out_cache_loc,
            w_uk,
            interleaved=self.interleaved,
            settled=True,
            kv_scale=self.scales_of(cache).keys,
            fp8=self.rounding(),
        )
        latent = self.decode_latents(batch, q_latent, q, cache)
        return expand_rows(latent, w_uv, self.o_proj.row_form(q), self.rounding_of_latents())


class NonAbsorbedAttention(LatentAttention):
    """The same attention without absorption (--disable-mla), for comparison: the cache keeps keys and values of all
    heads."""

    def write(
        self, q: Tensor, kv: Tensor, rotations: Tensor, batch: ForwardBatch, cache: Tensor
    ) -> None:
        latent, k_pe = kv.tensor_split([self.kv_lora_rank], dim=-1)
        expanded = self.keys_and_values(self.kv_a_layernorm(latent))
        k, v = expanded.tensor_split([self.qk_nope_head_dim], dim=-1)
        rope_gqa_write(
            q,
            k,
            k_pe[:, None].expand(-1, k.shape[1], -1),
            v,
            rotations,
            cache,
            batch.out_cache_loc,
            interleaved=self.interleaved,
            scales=self.scales_of(cache),
        )

    def prefill(
        self, batch: ForwardBatch, q: Tensor, kv: Tensor, cache: Tensor, out: Tensor
    ) -> None:
        del kv
        batch.attention[self.attention_index].gqa_prefill(
            q, cache, out, scales=self.scales_of(cache)
        )

    def decode(self, batch: ForwardBatch, q: Tensor, cache: Tensor, out: Tensor) -> None:
        batch.attention[self.attention_index].gqa_decode(
            q, cache, out, scales=self.scales_of(cache)
        )

    def write_and_decode(
        self,
        q: Tensor,
        kv: Tensor,
        rotations: Tensor,
        batch: ForwardBatch,
        cache: Tensor,
    ) -> Activations:
        self.write(q, kv, rotations, batch, cache)
        out = q.new_empty(*q.shape[:2], self.v_head_dim)
        self.decode(batch, q, cache, out)
        return out.flatten(1)


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

    def exchanged(self, hidden_states: Tensor, exchange: Exchange) -> Tensor:
        """Returns `forward` of the rows of all DP ranks, summed over them, for own rows [T, hidden_size]."""
        return exchange.scatter(self(exchange.gather(hidden_states), exchange.out_cache_loc))

    def serve(self, exchange: Exchange) -> None:
        if not exchange.is_needed:
            return
        none = self.gate.weight.new_empty(0, self.gate.weight.shape[1])
        form = self.form_of_all(exchange)
        if exchange.sends_quantized(none, form):
            logits = none.new_empty(0, len(self.gate.weight), dtype=torch.float32)
            self.exchanged_quantized(no_rows(none, form), logits, exchange)
        else:
            self.exchanged(none, exchange)

    def shared(self, hidden_states: Activations) -> Plus:
        """Starts the shared experts beside the routed ones, or returns their weights for the routed experts' kernels."""
        layer = self.shared_experts
        if layer is None:
            return None
        weights = SharedWeights(layer.gate_up_proj.operand, layer.down_proj.operand)
        if self.experts.takes(weights, hidden_states):
            return weights
        return beside(hidden_states, layer)

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
        if not self.gate.joins_norm(norm, hidden_states, residual):
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
        if not exchange.sends_quantized(hidden_states, form):
            normed, residual = norm.add(hidden_states, residual)
            return self.exchanged(normed, exchange), residual
        rows, residual = norm.add_for(form | PLAIN_ROWS, hidden_states, residual)
        assert isinstance(rows, Quantized)
        return self.exchanged_quantized(rows, self.gate.logits(rows), exchange), residual

    def exchanged_quantized(self, rows: Quantized, logits: Tensor, exchange: Exchange) -> Tensor:
        """`exchanged` with quantized rows and the gate's logits of own rows."""
        rows, logits = exchange.gather_quantized(rows, logits)
        shared = self.shared(rows)
        weights, ids = self.gate.choose(logits, exchange.out_cache_loc)
        return exchange.scatter(self.experts(rows, weights, ids, shared))

    def form_of_all(self, exchange: Exchange) -> RowForm:
        """Returns `row_form` of as many rows as all ranks of `exchange` have."""
        return self.row_form(self.gate.weight[:1].expand(sum(exchange.counts), -1))

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
        # Of `moe_routing`, on a rank with some of the experts, and if their load is counted
        self.table: Tensor | None
        self.counts: Tensor | None
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("counts", None, persistent=False)

    def forward(
        self, hidden_states: Activations, out_cache_loc: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns weights [T, K] float32 and expert ids [T, K] int32; -1 for idle rows, those whose `out_cache_loc`
        is 0."""
        return self.choose(self.logits(hidden_states), out_cache_loc)

    def logits(self, hidden_states: Activations) -> Tensor:
        """Returns the scores [T, E] float32 to `choose` by."""
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

    @property
    def operand(self) -> Weight:
        """The weight for products. Checkpoints do not quantize it."""
        return Weight(self.weight, constant=True)

    # ---- Fast path ----

    def joins_norm(self, norm: RMSNorm, hidden_states: Tensor, residual: Tensor) -> bool:
        """Whether `after_norm` is one kernel. If not, the norm and `forward` have fast kernels of their own."""
        return norm.joins_product(hidden_states, residual, len(self.weight))

    def after_norm(
        self, norm: RMSNorm, form: RowForm, hidden_states: Tensor, residual: Tensor
    ) -> tuple[Activations, Tensor, Tensor]:
        """Returns the normalized sum of `hidden_states` and `residual` in `form`, the sum, and the logits to `choose` by."""
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
