"""The DeepSeek family, top-down: V2, V2-Lite, Coder-V2, V2.5, V3, R1 and what shares their shape.

Multi-head latent attention (MLA) and fine-grained mixtures of experts (DeepSeek-V2,
arXiv:2405.04434; DeepSeek-V3, arXiv:2412.19437). The model sees a flat run of tokens: first one
token of each decoding request, then chunks of prompts (`batch.py`). Which checkpoint, device,
dtype or kernel it runs with is decided elsewhere.

Attribute names are those of the checkpoints, so that `weights.py` needs few rules.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mla_router.worker.kernels.attention.absorb import absorb_queries, expand_values
from mla_router.worker.kernels.attention.rope_absorb import rope_absorb
from mla_router.worker.kernels.beside import beside
from mla_router.worker.kernels.kv_cache.rope_gqa_write import rope_gqa_write
from mla_router.worker.kernels.kv_cache.rope_kv_write import rope_kv_write
from mla_router.worker.kernels.linear import linear
from mla_router.worker.kernels.moe.experts import Plus, SharedWeights
from mla_router.worker.kernels.moe.routing import RoutingRule, moe_routing
from mla_router.worker.kernels.norm_linear import has_kernel, norm_linear
from mla_router.worker.kernels.weight import Weight
from mla_router.worker.model.batch import ForwardBatch, Rows
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.decoder import Decoder, DecoderLayer
from mla_router.worker.model.experts import Experts
from mla_router.worker.model.layers import MLP, FeedForward, RMSNorm
from mla_router.worker.model.linear import Linear, empty_parameter
from mla_router.worker.model.rope import rotation_table

# The norms of the two latents do not follow the config's rms_norm_eps: the checkpoints were
# trained with the default of DeepSeek's RMSNorm there.
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
    kind = ExpandedAttention if config.expanded_cache else LatentAttention
    return kind(config, index)


def feed_forward(config: DeepseekConfig, index: int) -> FeedForward:
    """The first few layers are dense, or all of them."""
    if index < config.num_dense_layers or not config.num_experts:
        return MLP(config.hidden_size, config.intermediate_size)
    return MixtureOfExperts(config)


class LatentAttention(nn.Module):
    """MLA: the cache keeps one latent per token, from which keys and values of all heads follow."""

    def __init__(self, config: DeepseekConfig, index: int) -> None:
        super().__init__()
        self.attention_index = config.attention_index(index)
        self.num_heads = config.num_heads
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.v_head_dim = config.v_head_dim
        self.q_lora_rank = config.q_lora_rank
        self.kv_lora_rank = config.kv_lora_rank
        self.interleaved = config.rope.interleaved
        queries, hidden = config.num_heads * config.qk_head_dim, config.hidden_size

        # What projects the same input is one matrix.
        bias = config.attention_bias
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        if config.q_lora_rank is None:
            self.q_kv_proj = Linear(
                hidden,
                {"q_proj": queries, KV_A: latent},
                bias=(KV_A,) if bias else False,
            )
        else:
            self.q_kv_proj = Linear(
                hidden, {"q_a_proj": config.q_lora_rank, KV_A: latent}, bias=bias
            )
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, queries)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(
            config.kv_lora_rank, config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        )
        self.o_proj = Linear(config.num_heads * config.v_head_dim, hidden, bias=bias)

    def forward(
        self,
        norm: RMSNorm,
        update: Tensor,
        stream: Tensor | None,
        rotations: Tensor,
        batch: ForwardBatch,
        cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Of the normalized sum of `update` and `stream`, which are `DecoderLayer`'s; and the sum."""
        joined, stream = norm.add_then(self.q_kv_proj, update, stream)
        q, kv = self.queries_and_latents(joined)
        out = q.new_empty(len(q), self.num_heads, self.v_head_dim)
        if batch.is_decode:
            self.write_and_decode(q, kv, rotations, batch, cache, out)
        else:
            self.rotate_and_write(q, kv, rotations, batch, cache)
            batch.attend(self.attend, (q, kv), cache, out)
        return self.o_proj(out.flatten(1)), stream

    def attend(self, batch: ForwardBatch, rows: Rows, cache: Tensor, out: Tensor) -> None:
        q, kv = rows
        decodes = batch.num_decodes
        if decodes:
            self.decode(batch, q[:decodes], cache, out[:decodes])
        if decodes < len(q):
            self.prefill(batch, q[decodes:], kv[decodes:], cache, out[decodes:])

    def queries_and_latents(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H, nope + rope], and [T, kv_lora_rank + rope] that all heads share."""
        q, kv = torch.split(joined, list(self.q_kv_proj.shape.parts), dim=-1)
        if self.q_lora_rank is not None:
            q, _ = self.q_a_layernorm.add_then(self.q_b_proj, q, None)
        return q.view(len(joined), self.num_heads, -1), kv

    def rotate_and_write(
        self, q: Tensor, kv: Tensor, rotations: Tensor, batch: ForwardBatch, cache: Tensor
    ) -> None:
        """One row per token is all that later tokens will need; `kv` becomes these rows."""
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
        )

    def write_and_decode(
        self,
        q: Tensor,
        kv: Tensor,
        rotations: Tensor,
        batch: ForwardBatch,
        cache: Tensor,
        out: Tensor,
    ) -> None:
        """`rotate_and_write` and `decode` of the same rows."""
        w_uk, w_uv = self.up_projections(q.dtype)
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
        )
        self.decode_latents(batch, q_latent, q, cache, w_uv, out)

    def decode(self, batch: ForwardBatch, q: Tensor, cache: Tensor, out: Tensor) -> None:
        """Absorbed: attends over the cached rows as they are."""
        w_uk, w_uv = self.up_projections(q.dtype)
        q_latent = absorb_queries(q[..., : self.qk_nope_head_dim], w_uk)
        self.decode_latents(batch, q_latent, q, cache, w_uv, out)

    def decode_latents(
        self,
        batch: ForwardBatch,
        q_latent: Tensor,
        q: Tensor,
        cache: Tensor,
        w_uv: Weight,
        out: Tensor,
    ) -> None:
        """The rest of `decode`, once the queries are absorbed."""
        q_pe = q[..., self.qk_nope_head_dim :]
        latent = batch.attention[self.attention_index].mla_decode(q_latent, q_pe, cache)
        expand_values(latent, w_uv, out)

    def prefill(
        self, batch: ForwardBatch, q: Tensor, kv: Tensor, cache: Tensor, out: Tensor
    ) -> None:
        """Multi-head: expands prefixes and chunks."""
        batch.attention[self.attention_index].mla_prefill(
            q, kv, cache, self.expand, out, kv_lora_rank=self.kv_lora_rank
        )

    def expand(self, latent: Tensor) -> Tensor:
        """From [S, kv_lora_rank] the keys and values [S, H, nope + v] of all heads."""
        expanded: Tensor = self.kv_b_proj(latent)
        return expanded.view(len(latent), self.num_heads, -1)

    def up_projections(self, dtype: torch.dtype) -> tuple[Weight, Weight]:
        """Returns w_uk [H, nope, kv_lora_rank] and w_uv [H, v, kv_lora_rank], halves of kv_b_proj."""
        rows = self.qk_nope_head_dim, self.v_head_dim
        w_uk, w_uv = self.kv_b_proj.operand.split_heads(self.num_heads, rows, dtype)
        return w_uk, w_uv


class ExpandedAttention(LatentAttention):
    """The same attention as it is without MLA's economy: the cache keeps the keys and values of all heads,
    many times the numbers of a latent. For comparison (--disable-mla)."""

    def rotate_and_write(
        self, q: Tensor, kv: Tensor, rotations: Tensor, batch: ForwardBatch, cache: Tensor
    ) -> None:
        latent, k_pe = kv.tensor_split([self.kv_lora_rank], dim=-1)
        expanded = self.expand(self.kv_a_layernorm(latent))
        k, v = expanded.tensor_split([self.qk_nope_head_dim], dim=-1)
        rope_gqa_write(
            q,
            k,
            k_pe[:, None].expand(-1, self.num_heads, -1),
            v,
            rotations,
            cache,
            batch.out_cache_loc,
            interleaved=self.interleaved,
        )

    def write_and_decode(
        self,
        q: Tensor,
        kv: Tensor,
        rotations: Tensor,
        batch: ForwardBatch,
        cache: Tensor,
        out: Tensor,
    ) -> None:
        self.rotate_and_write(q, kv, rotations, batch, cache)
        self.decode(batch, q, cache, out)

    def decode(self, batch: ForwardBatch, q: Tensor, cache: Tensor, out: Tensor) -> None:
        batch.attention[self.attention_index].gqa_decode(q, cache, out)

    def prefill(
        self, batch: ForwardBatch, q: Tensor, kv: Tensor, cache: Tensor, out: Tensor
    ) -> None:
        del kv
        batch.attention[self.attention_index].gqa_prefill(q, cache, out)


class MixtureOfExperts(FeedForward):
    """A few routed experts for each token, and shared ones for all."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config.hidden_size, config.moe_intermediate_size, config.num_experts)
        self.shared_experts = (
            MLP(config.hidden_size, config.num_shared_experts * config.moe_intermediate_size)
            if config.num_shared_experts
            else None
        )

    def forward(self, hidden: Tensor, locations: Tensor | None = None) -> Tensor:
        shared = self.shared(hidden)
        out: Tensor = self.experts(hidden, *self.gate(hidden, locations), shared)
        return out

    def after(
        self, norm: RMSNorm, update: Tensor, stream: Tensor, locations: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self.gate.follows(update):
            hidden, stream = norm.add(update, stream)
            return self(hidden, locations), stream
        hidden, stream, logits = self.gate.after(norm, update, stream)
        # Before the choice, which leaves a GPU to what is begun beside it
        shared = self.shared(hidden)
        return self.experts(hidden, *self.gate.choose(logits, locations), shared), stream

    def shared(self, hidden: Tensor) -> Plus:
        """The shared experts' part: begun beside the others', or left to them."""
        layer = self.shared_experts
        if layer is None:
            return None
        weights = SharedWeights(layer.gate_up_proj.operand, layer.down_proj.operand)
        return weights if self.experts.takes(weights, hidden) else beside(hidden, layer)


class Gate(nn.Module):
    """Chooses experts by scores in float32, whatever the model's dtype: near ties must not flip."""

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

    def forward(self, hidden: Tensor, locations: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights [T, K] float32 and expert ids [T, K] int32; -1 for idle rows, those with location 0."""
        logits = linear(hidden, self.operand, out_dtype=torch.float32)
        return self.choose(logits, locations)

    @property
    def operand(self) -> Weight:
        """The weight as products take it. Checkpoints do not quantize it."""
        return Weight(self.weight, constant=True)

    def follows(self, update: Tensor) -> bool:
        """Whether `after` has a kernel. If not, the norm and `forward` are several, but fast ones."""
        return has_kernel(update, len(self.weight))

    def after(self, norm: RMSNorm, update: Tensor, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`norm` of update + stream, that sum, and what to `choose` by for the normalized rows."""
        logits, total, hidden = norm_linear(
            update,
            stream,
            norm.weight,
            norm.eps,
            self.operand,
            out_dtype=torch.float32,
            keep_normed=True,
        )
        assert hidden is not None
        return hidden, total, logits

    def choose(self, logits: Tensor, locations: Tensor | None) -> tuple[Tensor, Tensor]:
        return moe_routing(logits, self.rule, self.e_score_correction_bias, locations)
