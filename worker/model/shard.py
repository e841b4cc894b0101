"""Shards: the memory of a model for single tensors of a checkpoint, or for the piece of one that a rank holds, and the
checks of a tensor that is copied there.

Tensors are mapped into memory: of those that are cut, the pages of the piece are read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor


class Extent(NamedTuple):
    """`length` consecutive indices, from `start` on, of an axis of `full` indices."""

    start: int
    length: int
    full: int

    @staticmethod
    def whole(full: int) -> Extent:
        return Extent(0, full, full)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def is_whole(self) -> bool:
        return self.length == self.full

    def blocks(self, size: int | None) -> Extent:
        """Returns the blocks of `size` indices, of which the last one may be cut off. None: one block has all."""
        if size is None:
            return Extent.whole(1)
        first, last = self.start // size, -(-self.end // size)
        return Extent(first, last - first, -(-self.full // size))


class Members(NamedTuple):
    """Some of `full` experts, in the order in which a stack has them. None of them is there twice."""

    indices: tuple[int, ...]
    full: int

    @staticmethod
    def whole(full: int) -> Members:
        return Members(tuple(range(full)), full)


# The cut of each axis of a tensor; empty: the whole tensor
Extents = tuple[Extent, ...]


def full_shape(piece: Tensor, extents: Extents) -> tuple[int, ...]:
    """Returns the shape of the tensor of which `piece` is the part at `extents`."""
    return tuple(extent.full for extent in extents) or tuple(piece.shape)


def cut(tensor: Tensor, extents: Extents) -> Tensor:
    """Returns a view of the part of `tensor` at `extents`."""
    for dim, extent in enumerate(extents):
        tensor = tensor.narrow(dim, extent.start, extent.length)
    return tensor


class Mistake(NamedTuple):
    """The reason why a tensor of a checkpoint does not fit."""

    kind: str  # one word, to group the mistakes of a checkpoint
    reason: str


class Shard(ABC):
    """The destination of one tensor of a checkpoint, or of a piece of it."""

    is_needed = True  # a checkpoint without the tensor is an error
    extents: Extents = ()  # of the piece that is kept

    def bytes_read(self, tensor: Tensor) -> int:
        """Returns the bytes of `tensor` that `fill` reads."""
        size = tensor.nbytes
        for extent in self.extents:
            size = size * extent.length // extent.full
        return size

    @abstractmethod
    def fill(self, tensor: Tensor) -> Mistake | None:
        """Copies `tensor` of a file to the memory, or returns the reason why it does not fit."""


class Numbers(Shard):
    """Values as they are in the checkpoint. Floating-point types wider than a byte are converted."""

    def __init__(self, memory: Tensor, extents: Extents = ()) -> None:
        self.memory, self.extents = memory, extents

    def fill(self, tensor: Tensor) -> Mistake | None:
        memory, full = self.memory, full_shape(self.memory, self.extents)
        if tensor.shape != full:
            return Mistake("misshaped", f"not {list(full)}")
        # Values of one byte mean nothing without their scales
        if tensor.dtype != memory.dtype and not (is_wide(tensor) and is_wide(memory)):
            return Mistake("mistyped", f"{dtype_name(tensor)}, not {dtype_name(memory)}")
        memory.copy_(cut(tensor, self.extents))
        return None


class OnePlus(Numbers):
    """Numbers w of the checkpoint that the model uses as 1 + w."""

    def fill(self, tensor: Tensor) -> Mistake | None:
        mistake = super().fill(tensor)
        if mistake is None:
            self.memory.add_(1)
        return mistake


class Scales(Shard):
    """The float32 scales [S, C] of a quantized weight. They must be positive and finite.

    Checkpoints may leave out axes of size 1: [S] for S rows with one scale each, and [1] or [] for a whole tensor.
    """

    def __init__(self, memory: Tensor, extents: Extents = ()) -> None:
        self.memory, self.extents = memory, extents

    def fill(self, tensor: Tensor) -> Mistake | None:
        rows, columns = full_shape(self.memory, self.extents)
        mistake = scale_mistake(tensor, (rows, columns))
        if mistake is None:
            self.memory.copy_(cut(tensor.view(rows, columns), self.extents))
        return mistake


class ActivationScale(Shard):
    """The scale of a layer's inputs, one number. It is checked and not kept: products compute scales of their own."""

    is_needed = False

    def fill(self, tensor: Tensor) -> Mistake | None:
        return scale_mistake(tensor, (1, 1))


class OfAnotherRank(Shard):
    """A tensor that another rank keeps, and checks."""

    def __init__(self, *, is_needed: bool = True) -> None:
        self.is_needed = is_needed

    def bytes_read(self, tensor: Tensor) -> int:
        del tensor
        return 0

    def fill(self, tensor: Tensor) -> Mistake | None:
        del tensor
        return None


def scale_mistake(tensor: Tensor, shape: tuple[int, int]) -> Mistake | None:
    """Returns the reason why `tensor` has no scales for `shape`, or None."""
    if tensor.numel() != shape[0] * shape[1] or tensor.shape not in (shape, shape[:1], ()):
        return Mistake("misshaped", f"not {list(shape)}")
    if not is_wide(tensor):
        return Mistake("mistyped", f"{dtype_name(tensor)}, not float32")
    values = tensor.float()
    invalid = values[~((values > 0) & values.isfinite())]
    if len(invalid):
        return Mistake("invalid", f"a scale is {invalid[0].item()}, not positive and finite")
    return None


def is_wide(tensor: Tensor) -> bool:
    """Whether the numbers are of a floating-point type wider than a byte."""
    return tensor.is_floating_point() and tensor.itemsize > 1


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
