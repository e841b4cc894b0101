"""The layout of a step, and the interface of attention backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from mla_router.worker.kernels.attention.tree_tail import TreeTail
from mla_router.worker.model.attention import StepAttention
from mla_router.worker.model.config.attention_spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class ChunkExtent:
    """A prefill chunk: `length` new tokens of the request in `slot`, after `start` tokens in the KV cache."""

    slot: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """Tokens of the request in the KV cache, including the new ones."""
        return self.start + self.length

    def first_key(self, window: int | None) -> int:
        """Returns the position of the first token to which the first new one attends."""
        return 0 if window is None else max(0, self.start + 1 - window)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The requests of a step's rows and their KV cache. Tensors are on the device."""

    page_table: Tensor  # [slots, pages_per_request] int32
    page_size: int  # tokens a page
    decode_slots: Tensor  # [D] int64
    decode_lengths: Tensor  # [D] int32, tokens in the KV cache including the new one
    max_decode_length: int  # an upper bound of decode_lengths; 0 if D == 0
    chunks: tuple[ChunkExtent, ...] = ()
    window_page_table: Tensor | None = None  # as page_table, of layers that have window pages
    # Decode rows of a slot, next to each other, each one token longer than the one before: tokens to verify. Kernels
    # may read the cache once for all of them. Idle rows may have any length; their results are not used.
    queries_per_slot: int = 1
    # Speculative decoding with trees: these rows are nodes. They have equal lengths, of the tokens before the
    # root, and attend to some of the keys of nodes as well
    tree: TreeTail | None = None

    def of_windows(self) -> StepLayout:
        """Returns the layout for layers with a window, which may have pages of their own."""
        table = self.window_page_table
        return self if table is None else replace(self, page_table=table)


# Returns the attention of a prompt from its out_cache_loc [N] int64.
AtLocations = Callable[[Tensor], StepAttention]


class AttentionBackend(Protocol):
    """Plans the attention of a step for all layers of one `AttentionSpec`."""

    @property
    def name(self) -> str: ...

    @classmethod
    def supports(
        cls,
        spec: AttentionSpec,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
    ) -> str | None:
        """Returns the reason why the backend cannot serve `spec` on `device` in `dtype` with a KV cache of
        `kv_cache_dtype`, as words after the name of a flag; None if it can."""
        ...

    @property
    def supports_decode_graph(self) -> bool:
        """Whether the launches of a decode step depend only on its number of rows, so that they can be captured in a
        CUDA graph."""
        ...

    @property
    def max_keys(self) -> int:
        """Maximum number of keys that exist at a time in prefill. A step with more keys runs in several passes."""
        ...

    def prepare_decode(
        self, page_table: Tensor, page_size: int, slots: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Plans on the host the decode rows of the next step, padding included, if the backend needs it. `lengths`: the
        bounds of the plan, which are exact while a row gives one token. Called before the `plan` of a step, or before a
        replay of its graph. Does not wait for the device."""
        del page_table, page_size, slots, lengths

    def plan(self, layout: StepLayout) -> StepAttention:
        """Returns the attention of a step. Does not wait for the device."""
        ...

    @property
    def plans_prefill_on_host(self) -> bool:
        """Whether prefill is planned on the host for the lengths of each step, so that it cannot be captured."""
        ...

    def plan_prefill_graph(self, layout: StepLayout) -> AtLocations:
        """Returns the attention for a CUDA graph of all steps with one chunk without a cached prefix, padded to the
        length of the chunk of `layout`. The plan is valid as long as the result exists. Its launches read out_cache_loc
        instead of slots and page table. A backend that plans prefill on the host does not have it."""
        raise AssertionError(f"{self.name} plans prefill on the host: {layout.chunks}")
