"""Host numbers to the device, several arrays as one copy.

Two pinned host buffers take turns. Nothing waits for the copy: a step is packed only after the
tokens of the step two before it were waited for, so the buffer that is written over has certainly
been read.
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

# Of every array in the buffer, in bytes. Kernels are compiled anew for pointers that are aligned to less.
_ALIGNMENT = 16
_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}
_INTEGERS = {"q": torch.int64, "i": torch.int32}  # as `struct` has them


class Upload:
    """One use of it a step. Buffers grow to the largest step seen."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = [self._new_host(0), self._new_host(0)]
        self._outgrown: list[Tensor] = []
        self._hold(0)
        self._turn = 0

    def __call__(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[Tensor]:
        """`arrays` of int64, int32 or float32 as tensors on the device, of the same shapes. Good
        until the next call, for work that is launched before it."""
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
        """The same of integers that are Python's: int64 (q) or int32 (i), as `kinds` has it for each.

        For what the device waits for: in front of a step, when other work has emptied the processor's
        caches, a single call takes half the time of NumPy's many.
        """
        if self._device.type == "cpu":
            return [
                torch.tensor(column, dtype=_INTEGERS[kind])
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
        """The host buffer whose turn it is, of at least `size` bytes."""
        self._turn ^= 1
        if size > len(self._host[self._turn]):
            # The old buffer is kept; all old buffers together are smaller than the new one. During a capture
            # (`warmup_compile.py`) freed pinned memory is marked by an event of the capture, and the next allocation
            # of pinned memory fails.
            self._outgrown.append(self._host[self._turn])
            self._host[self._turn] = self._new_host(2 * size)
        if size > len(self._on_device):
            self._hold(2 * size)
        room: NDArray[np.uint8] = self._host[self._turn].numpy()
        return room

    def _send(self, size: int) -> None:
        if size:
            host = self._host[self._turn]
            self._on_device[:size].copy_(host[:size], non_blocking=True)

    def _at(self, start: int, dtype: torch.dtype, numbers: int) -> Tensor:
        """So many of them, from byte `start` on: few operations, since the device waits for them."""
        first = start // dtype.itemsize
        return self._typed[dtype][first : first + numbers]

    def _hold(self, size: int) -> None:
        """So much on the device, and the same memory as numbers of each kind."""
        self._on_device = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._typed = {dtype: self._on_device.view(dtype) for dtype in _DTYPES.values()}

    def _new_host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
