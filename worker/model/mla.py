"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434).

The KV cache keeps one latent for each token, from which keys and values of all heads are computed. Decode is absorbed
multi-query attention over the latents, prefill is multi-head attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.attention.absorb import absorb_queries, expand_values
from mla_router.worker.kernels.attention.absorb_quantized import StaticFP8, takes_heads
from mla_router.worker.kernels.attention.expand_rows import expand_rows
from mla_router.worker.kernels.attention.rope_absorb import rope_absorb
from mla_router.worker.kernels.kv_cache.fp8 import FORMATS
from mla_router.worker.kernels.kv_cache.rope_gqa_write import rope_gqa_write
from mla_router.worker.kernels.kv_cache.rope_kv_write import rope_kv_write
from mla_router.worker.kernels.weight import Activations, Weight
from mla_router.worker.model.batch import ForwardBatch, Rows
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.decoder import AttentionLayer
from mla_router.worker.model.layers import RMSNorm
from mla_router.worker.model.linear import Linear

# The norms of the two latents do not use the config's rms_norm_eps: checkpoints were trained with the default of
# DeepSeek's RMSNorm.
LATENT_NORM_EPS = 1e-6

KV_A = "kv_a_proj_with_mqa"


def latent_attention(config: DeepseekConfig, index: int) -> LatentAttention:
    """Returns the attention of layer `index`, without absorption with --disable-mla."""
    kind = NonAbsorbedAttention if config.disable_mla else LatentAttention
    return kind(config, index)


class LatentAttention(AttentionLayer):
    """MLA with absorption in decode."""

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
        q_latent = absorb_queries(q[..., : self.qk_nope_head_dim], w_uk, self.bmm_format())
        latent = self.decode_latents(batch, q_latent, q, cache)
        expand_values(latent, w_uv, out, self.latent_bmm_format())

    def decode_latents(
        self, batch: ForwardBatch, q_latent: Tensor, q: Tensor, cache: Tensor
    ) -> Tensor:
        """Returns the attended latents [T, H, kv_lora_rank] of absorbed queries, and of the rotary part of `q`."""
        q_pe = q[..., self.qk_nope_head_dim :]
        return batch.attention[self.attention_index].mla_decode(
            q_latent, q_pe, cache, scales=self.scales_of(cache)
        )

    def bmm_format(self, scale: float = 1.0) -> StaticFP8 | None:
        """Returns the FP8 format of the activations in products with w_uk and w_uv (--mla-bmm-dtype)."""
        return None if self.bmm_dtype is None else StaticFP8(self.bmm_dtype, scale)

    def latent_bmm_format(self) -> StaticFP8 | None:
        """Returns the format of attended latents: averages of cached ones, which have the scale of the cache's rows."""
        return self.bmm_format(self.kv_scales.keys)

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
        """Returns the rows for `o_proj`: `write` and `decode` of the same rows. One kernel writes and absorbs the
        queries."""
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
            fp8=self.bmm_format(),
        )
        latent = self.decode_latents(batch, q_latent, q, cache)
        return expand_rows(latent, w_uv, self.o_proj.row_form(q), self.latent_bmm_format())


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
            settled=True,
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
