"""Tensors of recorded steps whose memory others may use as well."""

from __future__ import annotations

import torch
from torch import Tensor


class _Memory:
    """Device memory as other libraries see it (`__cuda_array_interface__`), as integers."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "typestr": f"<i{tensor.itemsize}",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def alias(tensor: Tensor) -> Tensor:
    """`tensor`, on a CUDA device and of 16 or 32 bits, without keeping its memory from being used again.

    For what a recording leaves behind: it is read before anything that is recorded later may write
    there, so that all recordings can share it.
    """
    assert tensor.itemsize in (2, 4), tensor.dtype
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
