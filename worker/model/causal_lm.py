"""A decoder with its language model head. The engine runs this class for every architecture."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mla_router.worker.kernels.comm.groups import ONE_RANK
from mla_router.worker.kernels.linear import linear
from mla_router.worker.kernels.weight import Weight
from mla_router.worker.model.batch import ForwardBatch
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.decoder import Decoder
from mla_router.worker.model.linear import Linear
from mla_router.worker.model.parallel.placement import Placement
from mla_router.worker.model.shard import Extent, cut
from mla_router.worker.model.vision import VisionEncoder


class CausalLM(nn.Module):
    """A decoder with the head that gives its logits, and a vision encoder if the model takes images."""

    def __init__(self, config: ModelConfig, model: Decoder) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.vision: VisionEncoder | None = None  # of a model that takes images
        # The ranks that have parts of the model, and the rows of the head on this rank
        self.groups = ONE_RANK
        self.vocabulary = Extent.whole(config.vocab_size)
        self.placement: Placement | None = None  # of the routed experts on the ranks
        # The counts of `count_experts`, if experts are counted
        self.expert_counts: Tensor | None
        self.register_buffer("expert_counts", None, persistent=False)
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        )

    def own_name(self, name: str) -> str:
        """Returns the name here of the tensor `name` of a checkpoint."""
        return name

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, caches: Sequence[Tensor]) -> Tensor:
        """Returns final hidden states [T, hidden_size], for `logits`. Writes the rows of the new tokens to `caches`,
        the KV cache of each layer (`KVCachePool.layers`)."""
        hidden_states: Tensor = self.model(batch, caches)
        return hidden_states

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns embeddings [T, hidden_size] of tokens [T]."""
        embedded: Tensor = self.model.embed_tokens(tokens)
        return embedded

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Returns logits [R, vocab_size] float32. They are not part of `forward`, so that logits of many rows need not
        exist at once."""
        return self.groups.attention.all_gather(
            linear(hidden_states, self.head, out_dtype=torch.float32), dim=1
        )

    @property
    def head(self) -> Weight:
        """The rows of the head [vocab_size, hidden_size] on this rank: a weight of its own, or the embedding."""
        if self.lm_head is not None:
            return self.lm_head.operand
        embedding = self.model.embed_tokens.operand
        return embedding._replace(values=cut(embedding.values, (self.vocabulary,)))
