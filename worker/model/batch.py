"""The inputs of one forward pass.

T is the number of new tokens in the step. Decode rows come first, then prefill chunks. All tensors are on the model's
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mla_router.worker.model.attention import StepAttention
from mla_router.worker.model.exchange import Exchange


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    # [T] int64, the cache row of each new token: page * page_size + offset. Page 0 belongs to no request. Idle rows,
    # which pad a CUDA graph, have location 0
    out_cache_loc: Tensor
    num_decodes: int  # decode rows; the other rows are those of chunks
    attention: Sequence[StepAttention]  # indexed by the layer's `ModelConfig.attention_index`
    exchange: Exchange | None = None  # with other DP ranks
    # Runs of rows whose embeddings are not those of their tokens: the first row, and the embeddings [rows, hidden_size]
    embedded: Sequence[tuple[int, Tensor]] = ()
    # [T] int64, as out_cache_loc, of layers with a window if they have pages of their own
    window_cache_loc: Tensor | None = None

    def cache_loc(self, *, windowed: bool) -> Tensor:
        """Returns the cache rows of the new tokens in a layer: one with a window may have pages of its own."""
        own = self.window_cache_loc if windowed else None
        return self.out_cache_loc if own is None else own

    @property
    def is_decode(self) -> bool:
        """Whether all rows are decode rows. False during the capture of a piecewise graph, which serves any rows."""
        return 0 < self.num_decodes == len(self.tokens)

    @property
    def feed_forward_rows(self) -> Exchange:
        """The rows that feed-forward layers compute."""
        return Exchange(self.out_cache_loc) if self.exchange is None else self.exchange

    def embed(self, hidden_states: Tensor) -> None:
        """Overwrites the rows of `hidden_states` [T, hidden_size], the embeddings of the tokens, that have others. A
        piecewise graph of a model with images is cut here."""
        for row, embeddings in self.embedded:
            hidden_states[row : row + len(embeddings)] = embeddings

    def attend(self, attend: Attend, rows: Rows, cache: Tensor, out: Tensor) -> None:
        """Calls `attend(self, rows, cache, out)`. The rest of a layer depends on the number of rows alone, so a
        piecewise graph is cut here."""
        attend(self, rows, cache, out)


# The tensors that a layer's attention takes: queries [T, ...], and others of the same tokens.
Rows = tuple[Tensor, ...]
# A layer's attention, which writes `out` [T, ...].
Attend = Callable[[ForwardBatch, Rows, Tensor, Tensor], None]
