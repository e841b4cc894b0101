"""The plan of a step, which the scheduler gives to the engine.

A plan is host data and immutable: the overlap loop has two steps in flight, and planning the next step must not change
the data of the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from mla_router.worker.generation import SamplingParams


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that takes a slot: its first chunk is in this step.

    `output` is not empty if the request was retracted, or if another worker began its answer. Neither sequence changes
    before the results of the step are known.
    """

    slot: int
    sampling: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int] = ()
    prediction: Sequence[int] = ()  # the answer that the client expects, from its beginning


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows of a chunk that are placeholders of an image."""

    row: int  # the first, within the chunk
    key: int  # `ImageInfo.key`
    start: int  # placeholders of the image before the first row
    count: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Known tokens of one request at the positions start .. start + len(tokens) - 1.

    Row `logprob_start + i` of this chunk gives the logprob of `logprob_tokens[i]`.
    """

    slot: int
    start: int  # tokens of the request in the KV cache before this step
    tokens: tuple[int, ...]
    is_last: bool  # the request's known tokens end here, so this step samples the next token
    logprob_start: int = 0
    logprob_tokens: tuple[int, ...] = ()
    images: tuple[ImageRows, ...] = ()  # rows whose embeddings are those of images


class RowKind(IntEnum):
    """The origin of a row's token and position."""

    DECODE = 0  # the last sampled token of its slot: both are on the device (`engine/slots.py`)
    EXTEND = 1  # a token of a chunk: the host knows both
    IDLE = 2  # padding of a CUDA graph
    DRAFT = 3  # a draft of its slot, as many positions after the last sampled token: both are on the device
    NODE = 4  # a node of its slot's tree of drafts, whose root is the last sampled token (`engine/speculation/tree.py`)


@dataclass(frozen=True, slots=True)
class GroupStep:
    """The agreement of the DP ranks on a step, which they launch together. It is the same on all of them."""

    rows: tuple[int, ...]  # `StepPlan.num_tokens` of each DP rank; 0: the rank is idle
    decode: bool  # whether the step of each rank fits a decode graph (`engine/runners/choose.py`)
    feeds_drafter: bool = False  # whether the step of any rank feeds the drafter
    draft_slots: int = 0  # largest `StepPlan.draft_slots` of a rank


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward step. Its rows are the decode rows, then the rows of the chunks. An idle DP rank has none."""

    decode_slots: tuple[int, ...]
    # Upper bounds of the tokens in the KV cache after this step, for which the slots have pages. Exact for requests
    # that take one token a step
    decode_bounds: tuple[int, ...]
    chunks: tuple[PrefillChunk, ...]
    page_writes: tuple[tuple[int, int, int], ...]  # (slot, index in its page table, page)
    admitted: tuple[Admitted, ...]
    group: GroupStep | None = None  # with DP attention
    # Speculative decoding: a decode slot has a row for its last token, then rows for this many drafts
    num_drafts: int = 0
    # Rows of a decode slot whose drafts are a tree, of that depth, its root included; 0: they are a chain
    tree_nodes: int = 0
    # Whether the drafter runs over the rows of the step, to draft after them or after later rows
    feeds_drafter: bool = False
    # If it drafts for the next step, for each of `sampled_slots`: upper bound of the tokens in the drafter's KV
    # cache after this step
    draft_bounds: tuple[int, ...] = ()
    # Whether the host gets the drafts that the step makes (`PendingStep.drafts`)
    returns_drafts: bool = False

    @property
    def rows_per_decode(self) -> int:
        return self.tree_nodes or self.tokens_per_decode

    @property
    def tokens_per_decode(self) -> int:
        """Maximum number of tokens that the step gives to a decode slot."""
        return 1 + self.num_drafts

    @property
    def num_decode_rows(self) -> int:
        return len(self.decode_slots) * self.rows_per_decode

    @property
    def draft_slots(self) -> int:
        """Slots for which the step makes drafts: the sampled ones, or none."""
        return len(self.draft_bounds) if any(self.draft_bounds) else 0

    @property
    def runs_drafter(self) -> bool:
        """Whether the step of this DP rank or of another one feeds the drafter. All take part: a draft layer may have
        experts."""
        return self.feeds_drafter or (self.group is not None and self.group.feeds_drafter)

    @property
    def has_images(self) -> bool:
        return any(chunk.images for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + sum(len(chunk.tokens) for chunk in self.chunks)

    def row_kinds(self, size: int) -> bytes:
        """Returns the `RowKind` of each of `size` rows, padding included, as a byte."""
        decodes, tokens = self.num_decode_rows, self.num_tokens
        if self.tree_nodes:
            of_slot = bytes((RowKind.NODE,)) * self.tree_nodes
        else:
            of_slot = bytes((RowKind.DECODE,)) + bytes((RowKind.DRAFT,)) * self.num_drafts
        return (
            of_slot * len(self.decode_slots)
            + bytes((RowKind.EXTEND,)) * (tokens - decodes)
            + bytes((RowKind.IDLE,)) * (size - tokens)
        )

    @property
    def sampled_slots(self) -> tuple[int, ...]:
        """Slots for which this step samples a token, in the order of `StepResult.tokens`."""
        return self.decode_slots + tuple(chunk.slot for chunk in self.chunks if chunk.is_last)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Token bitmasks for some of a step's slots. The other slots may sample any token."""

    rows: tuple[int, ...]  # indices into `StepPlan.sampled_slots`, ascending
    # [sum(counts), ceil(vocab / 32)] int32; bit t % 32 of word t // 32 is token t
    bits: np.ndarray
    step: int = 0  # the number of `bits` in `MaskMemory`, where other ranks find them; 0: not there
    # Bitmasks of each of `rows`: for the token after the last one, then for those after each of its first drafts. The
    # step gives the slot no more tokens. Empty: one each
    counts: tuple[int, ...] = ()

    @property
    def counts_of_rows(self) -> tuple[int, ...]:
        return self.counts or (1,) * len(self.rows)
