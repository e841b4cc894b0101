"""What one forward pass of a model reads besides its weights.

T is the number of new tokens in the step; decode rows come first, then the prefill chunks. All
tensors lie on the model's device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChunkExtent:
    """A prefill chunk on the host's side: `length` new tokens of the request in `slot`, after the
    `start` tokens of it that the KV cache already holds."""

    slot: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    cache_locations: Tensor  # [T] int64, row of each new token: page * page_size + place in it
    page_table: Tensor  # [slots, pages_per_request] int32, pages of every slot
    decode_slots: Tensor  # [D] int64, D <= T: the slots of the decode rows
    decode_lengths: Tensor  # [D] int32, tokens in the cache including the new one
    max_decode_length: int  # the largest of decode_lengths, known on the host; 0 if D == 0
    chunks: tuple[ChunkExtent, ...]  # the rows after the decode rows, in order
    output_rows: Tensor  # [R] int64, rows of T whose hidden states are wanted

    @property
    def num_decodes(self) -> int:
        return self.decode_slots.shape[0]
