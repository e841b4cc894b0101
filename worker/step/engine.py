"""The engine, as the scheduler knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from mla_router.worker.images import ImagePart
from mla_router.worker.step.plan import StepPlan, TokenMasks
from mla_router.worker.step.result import StepResult
from mla_router.worker.tree_shape import TreeShape

# The launched forward pass of a step: its logits on the device. Only its engine can read it.
ForwardT = TypeVar("ForwardT")


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


class StepEngine(Protocol[ForwardT]):
    """Launches the two halves of a step on the device.

    The forward pass and the sampling are separate calls, so that the host can process the results of the previous step
    in between, while the device is busy. Neither call waits for the device.
    """

    @property
    def capacity(self) -> Capacity: ...

    def forward(self, plan: StepPlan) -> ForwardT: ...

    def sample(self, forward_output: ForwardT, masks: TokenMasks | None = None) -> PendingStep: ...

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
