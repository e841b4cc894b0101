"""What decoders have in common, whatever their attention and feed-forward layers are.

Attribute names are those of the checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from mla_router.worker.model.batch import ForwardBatch
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.layers import Embedding, FeedForward, RMSNorm


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

    @property
    def last(self) -> DecoderLayer:
        last = self.layers[-1]
        assert isinstance(last, DecoderLayer), f"a layer that is {type(last)}"
        return last

    def forward(self, batch: ForwardBatch, caches: Sequence[Tensor]) -> Tensor:
        """Final hidden states [T, hidden_size]."""
        update, stream = self.run_layers(batch, caches)
        return self.finish(update, stream, locations=batch.out_cache_loc)

    def run_layers(self, batch: ForwardBatch, caches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Hidden states, not yet added to the residual, and the residual, both [T, hidden_size], behind the attention of
        the last layer: later tokens need no more of a row than its keys and values there. `finish` has the rest."""
        # The look-up first: what kernels read ahead must be older than the embedding (`kernels/pdl.py`, settled)
        rotations = self.rotations[batch.positions]
        hidden_states: Tensor = self.embed_tokens(batch.tokens)
        residual: Tensor | None = None
        last = len(self.layers) - 1
        for layer, cache in zip(list(self.layers)[:last], caches, strict=False):
            hidden_states, residual = layer(hidden_states, residual, rotations, batch, cache)
        return self.last.attend(hidden_states, residual, rotations, batch, caches[last])

    def finish(
        self,
        update: Tensor,
        stream: Tensor,
        output_rows: Tensor | None = None,
        *,
        locations: Tensor | None = None,
    ) -> Tensor:
        """The rest of the step, as `DecoderLayer.finish`."""
        return self.last.finish(update, stream, self.norm, output_rows, locations)


class DecoderLayer(nn.Module):
    """Attention and a feed-forward layer, each on the normalized stream and added to it."""

    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: FeedForward) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self,
        update: Tensor,
        stream: Tensor | None,
        rotations: Tensor,
        batch: ForwardBatch,
        cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What the layer before adds to the residual stream [T, hidden_size], and the stream without
        it (None before the first layer); returns the same for the layer after. Addition and norm are
        one step: nothing else reads the stream in between."""
        update, stream = self.attend(update, stream, rotations, batch, cache)
        return self.feed_forward(update, stream, batch.out_cache_loc)

    def attend(
        self,
        update: Tensor,
        stream: Tensor | None,
        rotations: Tensor,
        batch: ForwardBatch,
        cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The first half. Attention gets the norm as well, since for one row its first product does all three
        (`RMSNorm.add_then`)."""
        attended: tuple[Tensor, Tensor] = self.self_attn(
            self.input_layernorm, update, stream, rotations, batch, cache
        )
        return attended

    def feed_forward(
        self, update: Tensor, stream: Tensor, locations: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The second half, of any rows: none of them reads another. `locations`: as of `FeedForward.after`."""
        return self.mlp.after(self.post_attention_layernorm, update, stream, locations)

    def finish(
        self,
        update: Tensor,
        stream: Tensor,
        norm: RMSNorm,
        output_rows: Tensor | None = None,
        locations: Tensor | None = None,
    ) -> Tensor:
        """The second half of a last layer, and the `norm` before the head: [R, hidden_size] of the rows whose
        output is wanted, `output_rows` [R] int64, or of all, whose `locations` tell idle rows."""
        if output_rows is not None:
            assert locations is None, "rows whose output is wanted are not idle"
            update = update.index_select(0, output_rows)
            stream = stream.index_select(0, output_rows)
        if not len(update):
            return update
        return norm.add(*self.feed_forward(update, stream, locations))[0]
