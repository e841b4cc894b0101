"""Shards: the memory of a model for single tensors of a checkpoint, and the checks of a tensor that is copied there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor


class Mistake(NamedTuple):
    """The reason why a tensor of a checkpoint does not fit."""

    kind: str  # one word, to group the mistakes of a checkpoint
    reason: str


class Shard(ABC):
    is_needed = True  # a checkpoint without the tensor is an error

    @abstractmethod
    def fill(self, tensor: Tensor) -> Mistake | None:
        """Copies `tensor` of a file to the memory, or returns the reason why it does not fit."""


class Numbers(Shard):
    """Values as they are in the checkpoint. Floating-point types wider than a byte are converted."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def fill(self, tensor: Tensor) -> Mistake | None:
        memory = self.memory
        if tensor.shape != memory.shape:
            return Mistake("misshaped", f"not {list(memory.shape)}")
        # Values of one byte mean nothing without their scales
        if tensor.dtype != memory.dtype and not (is_wide(tensor) and is_wide(memory)):
            return Mistake("mistyped", f"{dtype_name(tensor)}, not {dtype_name(memory)}")
        memory.copy_(tensor)
        return None


class Scales(Shard):
    """The float32 scales [S, C] of a quantized weight. They must be positive and finite.

    Checkpoints may leave out axes of size 1: [S] for S rows with one scale each, and [1] or [] for a whole tensor.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def fill(self, tensor: Tensor) -> Mistake | None:
        mistake = scale_mistake(tensor, (self.memory.shape[0], self.memory.shape[1]))
        if mistake is None:
            self.memory.copy_(tensor.view(self.memory.shape))
        return mistake


class ActivationScale(Shard):
    """The scale of a layer's inputs, one number. It is checked and not kept: products compute scales of their own."""

    is_needed = False

    def fill(self, tensor: Tensor) -> Mistake | None:
        return scale_mistake(tensor, (1, 1))


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
