"""Copies several host arrays to the device as one transfer.

Two pinned host buffers alternate, and the host does not wait for a copy: before it packs step N, it has waited for the
results of step N-2, whose buffer it overwrites.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Alignment of each array in the buffer, in bytes. Triton compiles a kernel again for pointers of smaller alignment.
_ALIGNMENT = 16
_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.int8): torch.int8,
}
_INTEGERS = {"q": torch.int64, "i": torch.int32, "b": torch.int8}  # format characters of `struct`


class Upload:
    """Copies arrays to `device`, once a step. The buffers grow to the largest step so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = [self._new_host(0), self._new_host(0)]
        self._outgrown: list[Tensor] = []
        self._allocate(0)
        self._turn = 0

    def __call__(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[Tensor]:
        """Returns `arrays` of int64, int32, int8 or float32 as tensors on the device. They are valid for work that is
        launched before the next call."""
        arrays = [np.ascontiguousarray(array) for array in arrays]
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        starts, size = [], 0
        for array in arrays:
            starts.append(size)
            size += array.nbytes + -array.nbytes % _ALIGNMENT
        packed = self._room(size)
        for array, start in zip(arrays, starts, strict=True):
            packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._send(size)
        return [
            self._at(start, _DTYPES[array.dtype], array.size).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def integers(self, kinds: str, *columns: Sequence[int]) -> list[Tensor]:
        """Returns columns of Python integers as tensors [len(column)] on the device: int64 for `q` in `kinds`, int32 for
        `i`, int8 for `b`.

        It is for copies that the device waits for: one call of `struct` takes half the time of several NumPy calls.
        """
        if self._device.type == "cpu":
            return [
                torch.tensor([*column], dtype=_INTEGERS[kind])
                for kind, column in zip(kinds, columns, strict=True)
            ]
        layout, starts, size = "=", [], 0
        for kind, column in zip(kinds, columns, strict=True):
            used = len(column) * _INTEGERS[kind].itemsize
            padding = -used % _ALIGNMENT
            layout += f"{len(column)}{kind}{padding}x"
            starts.append(size)
            size += used + padding
        room = self._room(size).data
        struct.pack_into(layout, room, 0, *chain.from_iterable(columns))
        self._send(size)
        return [
            self._at(start, _INTEGERS[kind], len(column))
            for kind, column, start in zip(kinds, columns, starts, strict=True)
        ]

    def _room(self, size: int) -> NDArray[np.uint8]:
        """Switches to the other host buffer and returns it, with at least `size` bytes."""
        self._turn ^= 1
        if size > len(self._host[self._turn]):
            # The old buffer is kept; all old buffers together are smaller than the new one. During a capture
            # (`warmup_compile.py`) freed pinned memory is marked by an event of the capture, and the next allocation
            # of pinned memory fails.
            self._outgrown.append(self._host[self._turn])
            self._host[self._turn] = self._new_host(2 * size)
        if size > len(self._on_device):
            self._allocate(2 * size)
        room: NDArray[np.uint8] = self._host[self._turn].numpy()
        return room

    def _send(self, size: int) -> None:
        if size:
            host = self._host[self._turn]
            self._on_device[:size].copy_(host[:size], non_blocking=True)

    def _at(self, start: int, dtype: torch.dtype, numbers: int) -> Tensor:
        """Returns `numbers` elements of `dtype` from byte `start` on. Has few operations, because the device waits."""
        first = start // dtype.itemsize
        return self._typed[dtype][first : first + numbers]

    def _allocate(self, size: int) -> None:
        """Allocates `size` bytes on the device, with a view of each dtype."""
        self._on_device = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._typed = {dtype: self._on_device.view(dtype) for dtype in _DTYPES.values()}

    def _new_host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
