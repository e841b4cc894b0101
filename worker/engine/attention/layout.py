"""Which requests a step's rows belong to, and where their KV cache lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mla_router.worker.model.attention import StepAttention
from mla_router.worker.model.config.attention_spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class ChunkExtent:
    """A prefill chunk on the host's side: `length` new tokens of the request in `slot`, after the
    `start` tokens of it that the KV cache already holds."""

    slot: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """Tokens of the request in the cache, the new ones included: what the last of them sees."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Tensors lie on the device; what is known on the host as well is there as plain numbers."""

    page_table: Tensor  # [slots, pages_per_request] int32, pages of every slot
    page_size: int  # tokens of a page
    decode_slots: Tensor  # [D] int64
    decode_lengths: Tensor  # [D] int32, tokens in the cache including the new one
    max_decode_length: int  # at least the largest of decode_lengths; 0 if D == 0
    chunks: tuple[ChunkExtent, ...] = ()


# From where in the cache, counted in rows, a prompt's rows lie: [N] int64.
AtLocations = Callable[[Tensor], StepAttention]


class AttentionBackend(Protocol):
    """Turns the layout of a step into the attention of all layers that have one `AttentionSpec`."""

    @property
    def name(self) -> str: ...

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot serve `spec` on `device` in `dtype`, in words that follow the name of a flag; None if it
        can."""
        ...

    @property
    def supports_decode_graph(self) -> bool:
        """Whether what a decode step launches depends on nothing but its number of rows, so that a CUDA
        graph can be made of it. `max_decode_length` is then only a bound."""
        ...

    @property
    def max_keys(self) -> int:
        """Keys of all chunks of a step that may exist at a time in prefill: more take no more memory."""
        ...

    def prepare_decode(
        self, page_table: Tensor, page_size: int, slots: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """What the host knows of the decode rows of the next step, that of padding included: for what a
        backend plans on the host. Called before the step's `plan` or, if it is recorded, before each replay
        of what was recorded with an earlier one. Does not wait for the device."""
        del page_table, page_size, slots, lengths

    def plan(self, layout: StepLayout) -> StepAttention:
        """Does not wait for the device."""
        ...

    @property
    def plans_prefill_on_host(self) -> bool:
        """Whether prefill is planned on the host for the lengths of each step, so that no graph can hold it."""
        ...

    def plan_prefill_graph(self, layout: StepLayout) -> AtLocations:
        """For a CUDA graph of all steps that are one chunk, padded to the length of that of `layout`, and begin their
        request. Planned once, and good as long as the result is kept; its launches read the locations of
        the rows instead of slots and page table. Not for a backend that plans prefill on the host."""
        raise AssertionError(f"{self.name} plans prefill on the host: {layout.chunks}")
