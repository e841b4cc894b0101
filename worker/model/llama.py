"""Llama, top-down: 3, 3.1, 3.2's text models and those before them. Qwen2 and Qwen2.5 differ in their biases alone.

A dense decoder with grouped-query attention and rotary embedding (Llama 3, arXiv:2407.21783, section
3.2). As in `deepseek.py`, the input is a flat run of tokens: first one token of each decoding
request, then chunks of prompts (`batch.py`).

Attributes have the names of the checkpoints, so that `weight_mapping.py` needs few rules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.kv_cache.rope_gqa_write import rope_gqa_write
from mla_router.worker.model.batch import ForwardBatch, Rows
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.llama import LlamaConfig
from mla_router.worker.model.decoder import AttentionLayer, Decoder, DecoderLayer
from mla_router.worker.model.layers import MLP
from mla_router.worker.model.linear import Linear
from mla_router.worker.model.rope import rotation_table


class LlamaForCausalLM(CausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        layers = (llama_layer(config, index) for index in range(config.num_layers))
        rotations = rotation_table(config.rope, config.max_position_embeddings)
        super().__init__(config, Decoder(config, layers, rotations))


def llama_layer(config: LlamaConfig, index: int) -> DecoderLayer:
    attention = GroupedQueryAttention(config, index)
    mlp = MLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    return DecoderLayer(config, attention, mlp)


class GroupedQueryAttention(AttentionLayer):
    """The cache keeps a key and a value per token for each of a few KV heads, which query heads share."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.attention_index = config.attention_index(index)
        self.windowed = config.attention_spec(index).window is not None
        self.head_dim = config.head_dim
        self.interleaved = config.rope.interleaved
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            bias=config.attention_bias,
        )
        self.o_proj = Linear(queries, config.hidden_size, bias=config.output_bias)

    def forward(self, qkv: Tensor, rotations: Tensor, batch: ForwardBatch, cache: Tensor) -> Tensor:
        # Queries [T, H, head_dim], keys and values [T, G, head_dim]
        q, k, v = (
            torch.unflatten(part, 1, (-1, self.head_dim))
            for part in torch.split(qkv, list(self.qkv_proj.shape.parts), dim=1)
        )
        # All of a key is rotated: no part of it is left as it is
        rope_gqa_write(
            q,
            k[..., :0],
            k,
            v,
            rotations,
            cache,
            batch.cache_loc(windowed=self.windowed),
            interleaved=self.interleaved,
            scales=self.scales_of(cache),
            settled=True,
        )
        out = q.new_empty(q.shape)
        batch.attend(self.attend, (q,), cache, out)
        projected: Tensor = self.o_proj(out.flatten(1))
        return projected

    def attend(self, batch: ForwardBatch, rows: Rows, cache: Tensor, out: Tensor) -> None:
        (q,) = rows
        attention, decodes = batch.attention[self.attention_index], batch.num_decodes
        scales = self.scales_of(cache)
        if decodes:
            attention.gqa_decode(q[:decodes], cache, out[:decodes], scales=scales)
        if decodes < len(q):
            attention.gqa_prefill(q[decodes:], cache, out[decodes:], scales=scales)
