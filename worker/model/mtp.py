"""Multi-token prediction (MTP): NextN layers after the model's last one that draft tokens further ahead.

DeepSeek-V3 (arXiv:2412.19437), section 2.2. Layer d reads the hidden state of the token at position p from the
layer before it (for d = 0: from the model), and the token at p + 1 + d, and drafts the token at p + 2 + d. Embedding
and head are the model's.

Attributes have the names of the checkpoints, where the numbers of these layers follow the model's. A layer that SGLang's
`export_deepseek_nextn.py` wrote to a folder of its own has the number 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mla_router.worker.kv_cache.spec import KVCacheSpec
from mla_router.worker.model.batch import ForwardBatch
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.decoder import DecoderLayer
from mla_router.worker.model.deepseek import feed_forward
from mla_router.worker.model.exchange import Exchange
from mla_router.worker.model.layers import RMSNorm
from mla_router.worker.model.linear import Linear
from mla_router.worker.model.mla import latent_attention


class MultiTokenPrediction(nn.Module):
    """All NextN layers of a checkpoint. `rotations` is the model's own table. `first`: the number of the first layer in
    the names of its tensors, by default that after the model's last layer."""

    def __init__(
        self, config: DeepseekConfig, rotations: Tensor, *, first: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.rotations = nn.Buffer(rotations, persistent=False)
        self.depths = [
            NextNLayer(config, config.num_layers + depth) for depth in range(config.num_mtp_layers)
        ]
        first = config.num_layers if first is None else first
        named = {str(first + depth): layer for depth, layer in enumerate(self.depths)}
        self.model = nn.ModuleDict({"layers": nn.ModuleDict(named)})

    def kv_cache_specs(self, dtype: torch.dtype) -> tuple[KVCacheSpec, ...]:
        """Returns the specs by depth (`ModelConfig.kv_cache_specs`)."""
        first = self.config.num_layers
        return tuple(
            self.config.attention_spec(first + depth).kv_cache_spec(dtype)
            for depth in range(len(self.depths))
        )

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        hidden_states: Tensor,
        embedded: Tensor,
        caches: Sequence[Tensor],
        depth: int = 0,
    ) -> Tensor:
        """Returns hidden states [T, hidden_size], for `CausalLM.logits`, or for the next depth.

        `batch` is the batch of the model's own step; its tokens are not read. For each of its T rows,
        `hidden_states` [T, hidden_size] is the result of the step, or of the depth before, and `embedded`
        [T, hidden_size] is `CausalLM.embed` of the token that comes 1 + depth positions later. `caches` are the KV
        caches of these layers (`KVCachePool.layers`).
        """
        rotations = self.rotations[batch.positions]
        return self.depths[depth].draft(hidden_states, embedded, rotations, batch, caches[depth])

    def serve(self, exchange: Exchange) -> None:
        """Does the part of a DP rank without rows in `forward` of the first layer."""
        self.depths[0].mlp.serve(exchange)


class NextNLayer(DecoderLayer):
    """A layer like the model's, after a projection that joins its two inputs."""

    def __init__(self, config: DeepseekConfig, index: int) -> None:
        super().__init__(config, latent_attention(config, index), feed_forward(config, index))
        hidden = config.hidden_size
        self.enorm = RMSNorm(hidden, config.rms_norm_eps)
        self.hnorm = RMSNorm(hidden, config.rms_norm_eps)
        self.eh_proj = Linear(2 * hidden, hidden)
        self.shared_head = SharedHead(config)

    def draft(
        self,
        hidden_states: Tensor,
        embedded: Tensor,
        rotations: Tensor,
        batch: ForwardBatch,
        cache: Tensor,
    ) -> Tensor:
        # The paper has the hidden state first, the checkpoints the embedding.
        both = torch.cat((self.enorm(embedded), self.hnorm(hidden_states)), dim=-1)
        hidden_states, residual = self.attend(self.eh_proj(both), None, rotations, batch, cache)
        return self.finish(
            hidden_states, residual, self.shared_head.norm, exchange=batch.feed_forward_rows
        )


class SharedHead(nn.Module):
    """The norm before the head, which is the model's."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
