"""Gemma 2, top-down: 2B, 9B and 27B (arXiv:2408.00118, section 2).

A dense decoder with grouped-query attention, like `llama.py`. Every other layer attends to a sliding window of the last
tokens (`Gemma2Config.attention_spec`). Attention scores and logits have soft caps. The results of each half of a layer
are normalized as well, before they are added to the residual.

Attributes have the names of the checkpoints, so that `weight_mapping.py` needs few rules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.rms_norm import norm_rows
from mla_router.worker.kernels.softcap import softcap_
from mla_router.worker.kernels.weight import PLAIN_ROWS, Activations, RowForm, dense_rows
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.gemma2 import Gemma2Config
from mla_router.worker.model.decoder import Decoder, DecoderLayer
from mla_router.worker.model.exchange import Exchange
from mla_router.worker.model.layers import MLP, Embedding, RMSNorm
from mla_router.worker.model.linear import Linear, empty_parameter
from mla_router.worker.model.llama import GroupedQueryAttention
from mla_router.worker.model.rope import rotation_table
from mla_router.worker.model.shard import OnePlus, Shard


class Gemma2ForCausalLM(CausalLM):
    def __init__(self, config: Gemma2Config) -> None:
        super().__init__(config, Gemma2Decoder(config))
        self.final_softcap = config.final_softcap

    def logits(self, hidden_states: Tensor) -> Tensor:
        logits = super().logits(hidden_states)
        return logits if self.final_softcap is None else softcap_(logits, self.final_softcap)


class Gemma2Decoder(Decoder):
    def __init__(self, config: Gemma2Config) -> None:
        layers = [Gemma2Layer(config, index) for index in range(config.num_layers)]
        super().__init__(
            config, layers, rotation_table(config.rope, config.max_position_embeddings)
        )
        self.embed_tokens = ScaledEmbedding(config.vocab_size, config.hidden_size)
        self.norm = Gemma2Norm(config)
        next_norms = [*(layer.input_layernorm for layer in layers[1:]), self.norm]
        for layer, norm in zip(layers, next_norms, strict=True):
            norm.follow(layer.post_feedforward_layernorm)


class ScaledEmbedding(Embedding):
    """An embedding whose rows are multiplied by sqrt(hidden_size), which is rounded to their dtype, as in training. A
    tied head has the rows as they are."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__(vocab_size, hidden_size)
        self.scale = torch.tensor(hidden_size**0.5, dtype=self.weight.dtype, device="cpu").item()

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale


class Gemma2Layer(DecoderLayer):
    """A transformer layer with norms before its two halves and after them:

        h = h + post_attention_layernorm(self_attn(qkv_proj(input_layernorm(h))))
        h = h + post_feedforward_layernorm(mlp(pre_feedforward_layernorm(h)))

    A norm after a half is left to the next one, like the sum: one kernel does all three.
    """

    input_layernorm: Gemma2Norm
    post_attention_layernorm: Gemma2Norm

    def __init__(self, config: Gemma2Config, index: int) -> None:
        mlp = MLP(config.hidden_size, config.intermediate_size, activation="gelu_tanh")
        super().__init__(config, GroupedQueryAttention(config, index), mlp)
        self.input_layernorm = Gemma2Norm(config)
        self.post_attention_layernorm = Gemma2Norm(config)
        self.pre_feedforward_layernorm = Gemma2Norm(config)
        self.post_feedforward_layernorm = Gemma2Norm(config)
        self.pre_feedforward_layernorm.follow(self.post_attention_layernorm)

    def feed_forward(
        self, hidden_states: Tensor, residual: Tensor, exchange: Exchange
    ) -> tuple[Tensor, Tensor]:
        return self.mlp.after_norm(
            self.pre_feedforward_layernorm, hidden_states, residual, exchange
        )


class Gemma2Norm(RMSNorm):
    """Multiplies by 1 + w for weights w of the checkpoint. The sums are float32: normalized rows are rounded once,
    after the product, as in training."""

    def __init__(self, config: Gemma2Config) -> None:
        super().__init__(config.hidden_size, config.rms_norm_eps)
        self.weight = empty_parameter(config.hidden_size, dtype=torch.float32)
        self._before: tuple[RMSNorm, ...] = ()

    def shard(self) -> Shard:
        return OnePlus(self.weight)

    def follow(self, norm: RMSNorm) -> None:
        """Leaves `norm`, whose result is added to the residual before this norm, to this norm's methods."""
        self._before = (norm,)  # a tuple hides it from torch: its owner is another module

    def add(self, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, total = self.add_for(PLAIN_ROWS, hidden_states, residual)
        return dense_rows(rows), total

    # ---- Fast path ----

    def add_and_project(
        self, projection: Linear, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        # Two norms in every program of the product take longer than a launch
        rows, total = self.add_for(projection.row_form(hidden_states), hidden_states, residual)
        return projection(rows), total

    def add_for(
        self, form: RowForm, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Activations, Tensor]:
        summed = self.sum(hidden_states, residual)
        before = None if residual is None else self._before[0].weight
        return norm_rows(summed, residual, self.weight, self.eps, form, before)
