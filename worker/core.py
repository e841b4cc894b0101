"""Types that all parts of a worker share.

The scheduler gives the engine a `StepPlan` and gets a `StepResult`. Both are host data and immutable: the overlap loop
has two steps in flight, and planning the next step must not change the data of the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from mla_router.worker.tree_shape import TreeShape

# The launched forward pass of a step: its logits on the device. Only its engine can read it.
ForwardOutput = TypeVar("ForwardOutput")


class FinishReason(StrEnum):
    """Reasons why a request ended, with OpenAI's names where it has one."""

    STOP = "stop"  # an EOS or stop token, or a stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the client disconnected or aborted it
    ERROR = "error"  # its computation failed
    LOST = "lost"  # this worker lost state of the request; another worker can compute it
    REFUSED = "refused"  # the request is invalid


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sampling parameters of one request. The HTTP server validates them.

    The sampled tokens depend on these parameters and on the request's own tokens, not on the batch. By default every
    feature is off.
    """

    max_tokens: int
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0  # least probability, relative to that of the most likely token
    seed: int = 0
    repetition_penalty: float = 1.0  # for tokens in prompt or output (CTRL, arXiv:1909.05858)
    frequency_penalty: float = 0.0  # for each occurrence in the output
    presence_penalty: float = 0.0  # for tokens that occur in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit)
    min_tokens: int = 0  # output tokens before any of `stop_token_ids` may be sampled
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: bool = False  # of the sampled tokens
    top_logprobs: int = 0  # number of most likely tokens for each token with a logprob
    # First prompt token with a logprob; None: no prompt logprobs
    prompt_logprobs_from: int | None = None
    # Bitmask of the tokens that may be sampled: bit t % 8 of byte t // 8 is token t. Empty: all tokens.
    allowed: bytes = b""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether the logits depend on all tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


class ImageKind(StrEnum):
    TILED = "tiled"  # one image of any resolution: a small copy of it, then tiles
    SINGLE = "single"  # one of several images: one tile
    VIDEO = "video"  # its tiles are frames


class ImageFormat(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The images that a model takes."""

    image_token: int  # id of the placeholder of an image
    video_token: int
    tile_tokens: int  # placeholders of a tile
    aspect_ratio: str  # the rule for the number of tiles, in transformers' words


class ImageInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image or a video without its pixels."""

    # A hash of the content beyond the vocabulary: the token id of its placeholders in prefix caches
    key: int
    kind: ImageKind
    num_tokens: int  # placeholders
    num_tiles: int
    height: int  # pixels of the original
    width: int
    # The tower takes (value * scale - mean) / std of each colour
    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class ImagePart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive tiles of an image. Its parts are encoded in order."""

    info: ImageInfo
    tiles: bytes  # [N, 3, tile_size, tile_size] uint8


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows of a chunk that are placeholders of an image."""

    row: int  # the first, within the chunk
    key: int  # `ImageInfo.key`
    start: int  # placeholders of the image before the first row
    count: int


MAX_PREDICTION = 1 << 14  # maximum number of tokens of a prediction


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


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log-probabilities of consecutive tokens, and of the most likely tokens at their positions."""

    logprobs: list[float] = []
    top_ids: list[list[int]] = []  # one list a token, most likely first; empty without top_logprobs
    top_logprobs: list[list[float]] = []

    def first(self, count: int) -> Logprobs:
        """Returns the logprobs of the first `count` tokens."""
        return Logprobs(self.logprobs[:count], self.top_ids[:count], self.top_logprobs[:count])


# In `StepResult.tokens`: the row has no token here, because its logits are NaN or its bitmask allows none.
NO_TOKEN = -1
# Fills the rest of a row whose step gave fewer tokens than the maximum; not in `StepResult`.
UNUSED = -2


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, aligned with `StepPlan.sampled_slots`.

    A decode row gives up to `Capacity.tokens_per_row` tokens, which may be none. A row of a chunk gives one.
    """

    tokens: list[list[int]]  # of each row, in order
    logprobs: list[Logprobs | None] | None = None  # of each row's tokens; None if no row has them
    prompt_logprobs: list[Logprobs | None] | None = None  # aligned with `StepPlan.chunks`
    # Time for which the device was busy with the step; None: not measured
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of an engine's first steps, measured at start-up."""

    single: float  # a step of one token
    tokens: int  # tokens of the chunk
    chunk: float  # a step of the chunk
    prefix: int  # tokens of the prefix
    single_after_prefix: float  # a step of one token after the prefix
    chunk_after_prefix: float  # a step of the chunk after the prefix


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of an engine, fixed at start-up."""

    num_pages: int  # usable pages, without page 0, to which padding rows are written
    page_size: int  # tokens a page
    num_slots: int  # maximum number of requests in a batch
    context_length: int  # maximum number of tokens of one request, prompt and output
    tokens_per_row: int = 1  # maximum number of tokens that a decode row gives in one step
    # Maximum number of embeddings of images on the device; 0: the model takes no images
    image_tokens: int = 0
    image_tiles: int = 1  # maximum number of tiles in one batch of the vision tower
    # Window in tokens of the layers that have pages of their own (`kv_cache/spec.py`): each page then belongs to one of two
    # kinds of layers. None: all layers share their pages
    window: int | None = None
    tree: TreeShape | None = None  # of drafts; None: they are a chain, or there are none

    @property
    def page_kinds(self) -> int:
        """Pages that hold `page_size` tokens of all layers."""
        return 1 if self.window is None else 2

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafts of a decode slot that one step accepts."""
        return self.tokens_per_row - 1

    @property
    def tree_nodes(self) -> int:
        """`StepPlan.tree_nodes` of a step that verifies drafts."""
        return 0 if self.tree is None else self.tree.nodes

    @property
    def rows_per_decode(self) -> int:
        """Rows of a decode slot in a step that verifies drafts."""
        return self.tree_nodes or self.tokens_per_row

    @property
    def tree_pages(self) -> int:
        """Pages of the KV cache, after those of requests, for the nodes of the trees of one step."""
        return 0 if self.tree is None else -(-self.tree.cache_rows // self.page_size)

    @property
    def longest_row(self) -> int:
        """Largest length of a row of a step. Rows of drafts that a request cannot take are idle, but have a length."""
        return self.context_length + self.num_drafts

    @property
    def max_total_tokens(self) -> int:
        return self.num_pages // self.page_kinds * self.page_size

    @property
    def pages_per_request(self) -> int:
        """Entries of a request in the page table: of window pages as many again, after the others."""
        return -(-self.context_length // self.page_size)


class PendingStep(Protocol):
    """A launched step whose results are not on the host yet."""

    def wait(self) -> StepResult:
        """Blocks until the results are on the host."""
        ...

    def drafts(self) -> list[list[int]]:
        """Blocks until the drafts are on the host, later than the results. Returns those after each of
        `StepPlan.sampled_slots`, of a tree the chain of its best nodes. Call it only for a plan that `returns_drafts`,
        and before the step after next is sampled."""
        ...


class PendingImages(Protocol):
    """A batch of the vision tower, whose layers are launched piece by piece."""

    @property
    def layers_left(self) -> int:
        """Layers that are not launched yet."""
        ...

    @property
    def layer_s(self) -> float:
        """Measured seconds by which a layer holds up the steps, 0 if no layer has been measured."""
        ...

    def done(self) -> bool:
        """Returns whether all layers are computed."""
        ...


class StepEngine(Protocol[ForwardOutput]):
    """Launches the two halves of a step on the device.

    The forward pass and the sampling are separate calls, so that the host can process the results of the previous step
    in between, while the device is busy. Neither call waits for the device.
    """

    @property
    def capacity(self) -> Capacity: ...

    def forward(self, plan: StepPlan) -> ForwardOutput: ...

    def sample(
        self, forward_output: ForwardOutput, masks: TokenMasks | None = None
    ) -> PendingStep: ...

    def encode(self, parts: tuple[ImagePart, ...], dropped: tuple[int, ...]) -> PendingImages:
        """Begins a batch of the vision tower for `parts`, after the one before is done, and drops the images of the keys
        `dropped`. Chunks may name an image after all its parts are done."""
        ...

    def encode_layers(self, count: int) -> None:
        """Launches up to `count` more layers of the batch: later steps wait for them."""
        ...

    def is_usable_after(self, error: Exception) -> bool:
        """Returns whether later steps may succeed after a step raised `error`."""
        ...
