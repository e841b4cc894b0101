"""Multi-token prediction: layers behind the model's last one that guess tokens further ahead.

DeepSeek-V3 (arXiv:2412.19437), section 2.2. Layer d sees what the layer before it (for d = 0: the model)
makes of the token at position p, and the token at p + 1 + d, and guesses the one at p + 2 + d. Embedding
and head are the model's.

Attribute names are those of the checkpoints, where these layers are counted on from the model's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mla_router.worker.kv_cache.spec import KVCacheSpec
from mla_router.worker.model.batch import ForwardBatch
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.decoder import DecoderLayer
from mla_router.worker.model.deepseek import feed_forward, latent_attention
from mla_router.worker.model.layers import RMSNorm
from mla_router.worker.model.linear import Linear


class MultiTokenPrediction(nn.Module):
    """All of a checkpoint's prediction layers. `rotations` is the model's own table."""

    def __init__(self, config: DeepseekConfig, rotations: Tensor) -> None:
        super().__init__()
        self.config = config
        self.rotations = nn.Buffer(rotations, persistent=False)
        self.depths = [
            PredictionLayer(config, config.num_layers + depth)
            for depth in range(config.num_mtp_layers)
        ]
        named = {str(config.num_layers + depth): layer for depth, layer in enumerate(self.depths)}
        self.model = nn.ModuleDict({"layers": nn.ModuleDict(named)})

    def kv_cache_specs(self, dtype: torch.dtype) -> tuple[KVCacheSpec, ...]:
        """By depth, as `ModelConfig.kv_cache_specs`."""
        first = self.config.num_layers
        return tuple(
            self.config.attention_spec(first + depth).kv_cache_spec(dtype)
            for depth in range(len(self.depths))
        )

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        hidden: Tensor,
        embedded: Tensor,
        caches: Sequence[Tensor],
        depth: int = 0,
    ) -> Tensor:
        """Hidden states [T, hidden_size], for `CausalLM.logits`, or for the next depth.

        `batch` is that of the model's own step; its tokens are not read. For each of its T rows,
        `hidden` [T, hidden_size] is the result of the step, or of the depth before, and `embedded`
        [T, hidden_size] is `CausalLM.embed` of the token that comes 1 + depth positions later. `caches` are the KV
        caches of these layers (`KVCachePool.layers`).
        """
        rotations = self.rotations[batch.positions]
        return self.depths[depth].predict(hidden, embedded, rotations, batch, caches[depth])


class PredictionLayer(DecoderLayer):
    """A layer like the model's, behind what joins its two inputs."""

    def __init__(self, config: DeepseekConfig, index: int) -> None:
        super().__init__(config, latent_attention(config, index), feed_forward(config, index))
        hidden = config.hidden_size
        self.enorm = RMSNorm(hidden, config.rms_norm_eps)
        self.hnorm = RMSNorm(hidden, config.rms_norm_eps)
        self.eh_proj = Linear(2 * hidden, hidden)
        self.shared_head = SharedHead(config)

    def predict(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rotations: Tensor,
        batch: ForwardBatch,
        cache: Tensor,
    ) -> Tensor:
        # The paper has the hidden state first, the checkpoints the embedding.
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        update, stream = self.attend(joined, None, rotations, batch, cache)
        return self.finish(update, stream, self.shared_head.norm)


class SharedHead(nn.Module):
    """The norm before the model's head, which is the only part of it that is not shared."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
