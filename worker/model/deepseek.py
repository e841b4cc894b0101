"""The DeepSeek family, top-down: V2, V2-Lite, Coder-V2, V2.5, V3, R1 and models of the same architecture.

Multi-head latent attention (`mla.py`) and fine-grained mixtures of experts (`moe.py`): DeepSeek-V2, arXiv:2405.04434, and
DeepSeek-V3, arXiv:2412.19437. The input is a flat run of tokens: first those of decoding requests, then chunks of prompts
(`batch.py`). Other modules decide on checkpoint, device, dtype and kernels.

Attributes have the names of the checkpoints, so that `weight_mapping.py` needs few rules.
"""

from __future__ import annotations

from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.decoder import Decoder, DecoderLayer
from mla_router.worker.model.layers import MLP, FeedForward
from mla_router.worker.model.mla import latent_attention
from mla_router.worker.model.moe import MixtureOfExperts
from mla_router.worker.model.rope import rotation_table


class DeepseekForCausalLM(CausalLM):
    def __init__(self, config: DeepseekConfig) -> None:
        layers = (deepseek_layer(config, index) for index in range(config.num_layers))
        rotations = rotation_table(config.rope, config.max_position_embeddings)
        super().__init__(config, Decoder(config, layers, rotations))


def deepseek_layer(config: DeepseekConfig, index: int) -> DecoderLayer:
    return DecoderLayer(config, latent_attention(config, index), feed_forward(config, index))


def feed_forward(config: DeepseekConfig, index: int) -> FeedForward:
    """Returns the feed-forward layer: the first layers are dense, and all of them in a model without experts."""
    if index < config.num_dense_layers or not config.num_experts:
        return MLP(config.hidden_size, config.intermediate_size)
    return MixtureOfExperts(config)
