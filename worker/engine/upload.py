"""Host arrays to the device, several as one copy.

Two pinned host buffers take turns. Nothing waits for the copy: a step is packed only after the
tokens of the step two before it were waited for, so the buffer that is written over has certainly
been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Of every array in the buffer, in bytes. Kernels are compiled anew for pointers that are aligned to less.
_ALIGNMENT = 16
_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


class Upload:
    """One use of it a step. Buffers grow to the largest step seen."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = [self._new_host(0), self._new_host(0)]
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
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._turn ^= 1
        if size > len(self._host[self._turn]):
            self._host[self._turn] = self._new_host(2 * size)
        if size > len(self._on_device):
            self._hold(2 * size)
        host = self._host[self._turn][:size]
        packed = host.numpy()
        for array, start in zip(arrays, starts, strict=True):
            packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        if size:
            self._on_device[:size].copy_(host, non_blocking=True)
        return [
            self._at(start // array.itemsize, array)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def _at(self, start: int, array: np.ndarray[Any, Any]) -> Tensor:
        """Of so many numbers of its kind on: few operations, since the device waits for them."""
        flat = self._typed[array.dtype][start : start + array.size]
        return flat if array.ndim == 1 else flat.view(array.shape)

    def _hold(self, size: int) -> None:
        """So much on the device, and the same memory as numbers of each kind."""
        self._on_device = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._typed = {kind: self._on_device.view(dtype) for kind, dtype in _DTYPES.items()}

    def _new_host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
