"""The parts that all decoders share, with any attention and feed-forward layers.

Attributes have the names of the checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor, nn

from mla_router.worker.kernels.kv_cache.fp8 import UNSCALED, KVScales, is_fp8
from mla_router.worker.model.batch import ForwardBatch
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.exchange import NO_EXCHANGE, Exchange
from mla_router.worker.model.layers import Embedding, FeedForward, RMSNorm
from mla_router.worker.model.linear import Linear
from mla_router.worker.model.shard import Shard


class Decoder(nn.Module):
    """Embedding, layers, and the norm before the head. `rotations` [positions, ...] are looked up
    once a step, for all layers."""

    def __init__(
        self, config: ModelConfig, layers: Iterable[DecoderLayer], rotations: Tensor
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotations = nn.Buffer(rotations, persistent=False)

    def forward(self, batch: ForwardBatch, caches: Sequence[Tensor]) -> Tensor:
        """Returns final hidden states [T, hidden_size]. `caches` are the KV caches of the layers."""
        hidden_states, residual = self.run_layers(batch, caches)
        return self.finish(hidden_states, residual, exchange=batch.feed_forward_rows)

    # ---- The two halves of a step: only rows with an output need the second ----

    def run_layers(self, batch: ForwardBatch, caches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns hidden states and residual, [T, hidden_size] each, after the attention of the last layer: later
        tokens need nothing of a row but its keys and values there."""
        # The look-up first: memory that kernels read early is older than the embedding (`kernels/pdl.py`, settled)
        rotations = self.rotations[batch.positions]
        hidden_states: Tensor = self.embed_tokens(batch.tokens)
        batch.embed(hidden_states)
        residual: Tensor | None = None
        last = len(self.layers) - 1
        for layer, cache in zip(list(self.layers)[:last], caches, strict=False):
            hidden_states, residual = layer(hidden_states, residual, rotations, batch, cache)
        return self.last.attend(hidden_states, residual, rotations, batch, caches[last])

    def finish(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        output_rows: Tensor | None = None,
        *,
        exchange: Exchange = NO_EXCHANGE,
    ) -> Tensor:
        """Returns final hidden states [R, hidden_size] from the results of `run_layers`: of the rows `output_rows` [R]
        int64, or of all rows, which are those of `exchange`."""
        return self.last.finish(hidden_states, residual, self.norm, output_rows, exchange)

    def serve(self, exchange: Exchange) -> tuple[Tensor, Tensor]:
        """Does the part of a DP rank without rows in the exchange of `run_layers` of other DP ranks."""
        for layer in list(self.layers)[:-1]:
            assert isinstance(layer, DecoderLayer), f"a layer that is {type(layer)}"
            layer.mlp.serve(exchange)
        none = self.embed_tokens.weight[:0]
        return none, none

    @property
    def last(self) -> DecoderLayer:
        last = self.layers[-1]
        assert isinstance(last, DecoderLayer), f"a layer that is {type(last)}"
        return last


class AttentionLayer(nn.Module):
    """Base of attention layers.

    `qkv_proj` is applied to normalized rows. `forward(qkv, rotations, batch, cache)` takes the result [T, outputs],
    writes the rows of the new tokens to `cache`, attends, and returns [T, hidden_size].
    """

    attention_index: int  # in `ModelConfig.attention_specs`
    qkv_proj: Linear
    kv_scales = UNSCALED  # of an FP8 KV cache, from the checkpoint if it has them (`quantization/kv_scales.py`)
    kv_scale_shards: Mapping[str, Shard] = MappingProxyType({})  # by their names in the checkpoint

    def scales_of(self, cache: Tensor) -> KVScales:
        """Returns the scales of the rows of `cache`: only an FP8 cache has other scales than 1."""
        return self.kv_scales if is_fp8(cache.dtype) else UNSCALED


class DecoderLayer(nn.Module):
    """A transformer layer with norms before its two halves:

        h = h + self_attn(qkv_proj(input_layernorm(h)))
        h = h + mlp(post_attention_layernorm(h))

    Each sum is left to the norm after it, since one kernel does both. So a half takes and returns two tensors
    [T, hidden_size], whose sum is h: `hidden_states`, and the `residual`, which is None before the first layer. If ranks
    divide the layer, `hidden_states` is a part of this rank: the norm sums the parts as well.
    """

    def __init__(self, config: ModelConfig, self_attn: AttentionLayer, mlp: FeedForward) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None,
        rotations: Tensor,
        batch: ForwardBatch,
        cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        hidden_states, residual = self.attend(hidden_states, residual, rotations, batch, cache)
        return self.feed_forward(hidden_states, residual, batch.feed_forward_rows)

    def attend(
        self,
        hidden_states: Tensor,
        residual: Tensor | None,
        rotations: Tensor,
        batch: ForwardBatch,
        cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        qkv, residual = self.input_layernorm.add_and_project(
            self.self_attn.qkv_proj, hidden_states, residual
        )
        attended: Tensor = self.self_attn(qkv, rotations, batch, cache)
        return attended, residual

    def feed_forward(
        self, hidden_states: Tensor, residual: Tensor, exchange: Exchange
    ) -> tuple[Tensor, Tensor]:
        """The rows may be some of a step's: no row reads another one here."""
        return self.mlp.after_norm(self.post_attention_layernorm, hidden_states, residual, exchange)

    def finish(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        norm: RMSNorm,
        output_rows: Tensor | None = None,
        exchange: Exchange = NO_EXCHANGE,
    ) -> Tensor:
        """Computes the second half of a last layer, and the `norm` before the head (`Decoder.finish`)."""
        if output_rows is not None:
            assert exchange.out_cache_loc is None, "rows with an output are not idle"
            assert not exchange.is_needed, "an exchange takes all rows"
            hidden_states = hidden_states.index_select(0, output_rows)
            residual = residual.index_select(0, output_rows)
        if not len(hidden_states):
            self.mlp.serve(exchange)
            return hidden_states
        return norm.add(*self.feed_forward(hidden_states, residual, exchange))[0]
