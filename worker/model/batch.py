"""What one forward pass of a model reads besides its weights.

T is the number of new tokens in the step; decode rows come first, then the prefill chunks. All
tensors lie on the model's device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mla_router.worker.model.attention import StepAttention


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    # [T] int64, cache row of each new token: page * page_size + place in it. No token lies in page 0, which idle
    # rows, those that pad a CUDA graph, write to: their location is 0
    out_cache_loc: Tensor
    num_decodes: int  # rows that are one token of a request each; the others are chunks
    attention: Sequence[StepAttention]  # by `ModelConfig.attention_index` of a layer

    @property
    def is_decode(self) -> bool:
        """Whether all rows are decode rows. False while a piecewise graph is captured, which is for any rows."""
        return 0 < self.num_decodes == len(self.tokens)

    def attend(self, attend: Attend, rows: Rows, cache: Tensor, out: Tensor) -> None:
        """`attend(self, rows, cache, out)`: the only part of a layer in which more matters than the number of rows.
        A piecewise graph is cut here."""
        attend(self, rows, cache, out)


# Of a step's tokens, each [T, ...]: queries, and what else a layer's attention is to have.
Rows = tuple[Tensor, ...]
# Writes `out` [T, ...].
Attend = Callable[[ForwardBatch, Rows, Tensor, Tensor], None]
