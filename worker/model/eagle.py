"""EAGLE: a draft head for Llama, with one layer.

EAGLE (arXiv:2401.15077), section 3.1. A row has the normalized hidden state of a token at the position p, from the
model or from the head itself, and the embedding of the token at p + 1. The result takes the place of the normalized
hidden state at p + 1, so the model's head makes of it the draft of the token at p + 2. Embedding and head are the
model's.

The published heads have no norm before the attention and none after the layer. Attributes have their names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mla_router.worker.kv_cache.spec import KVCacheSpec
from mla_router.worker.model.batch import ForwardBatch
from mla_router.worker.model.config.llama import LlamaConfig
from mla_router.worker.model.exchange import NO_EXCHANGE, Exchange
from mla_router.worker.model.layers import MLP, RMSNorm
from mla_router.worker.model.linear import Linear
from mla_router.worker.model.llama import GroupedQueryAttention

# Copies of tensors of the model
UNUSED_BY_EAGLE = frozenset({"embed_tokens.weight", "lm_head.weight"})


class EagleHead(nn.Module):
    """The draft head of EAGLE: one layer after a linear layer. `config`: of the folder of the head. `rotations`: the
    model's own table."""

    def __init__(self, config: LlamaConfig, rotations: Tensor, *, bias: bool) -> None:
        super().__init__()
        self.config = config
        self.rotations = nn.Buffer(rotations, persistent=False)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList([EagleLayer(config)])

    def kv_cache_specs(self, dtype: torch.dtype) -> tuple[KVCacheSpec, ...]:
        """Returns the spec of the one layer (`ModelConfig.kv_cache_specs`)."""
        return self.config.kv_cache_specs(dtype)

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, hidden_states: Tensor, embedded: Tensor, caches: Sequence[Tensor]
    ) -> Tensor:
        """Returns hidden states [T, hidden_size], for `CausalLM.logits`, or for the next draft. Arguments are those of
        `MultiTokenPrediction.forward`."""
        joined = self.fc(torch.cat((embedded, hidden_states), dim=-1))
        out: Tensor = self.layers[0](joined, self.rotations[batch.positions], batch, caches[0])
        return out

    def serve(self, exchange: Exchange) -> None:
        """Does nothing: the head has no experts, and computes its own rows alone."""
        del exchange


class EagleLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = GroupedQueryAttention(config, 0)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(
        self, hidden_states: Tensor, rotations: Tensor, batch: ForwardBatch, cache: Tensor
    ) -> Tensor:
        qkv = self.self_attn.qkv_proj(hidden_states)
        attended = self.self_attn(qkv, rotations, batch, cache)
        norm = self.post_attention_layernorm
        fed, residual = self.mlp.after_norm(norm, attended, hidden_states, NO_EXCHANGE)
        return norm.sum(fed, residual) + residual
