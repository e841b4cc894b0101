"""Tensors of captured graphs whose memory other graphs may reuse."""

from __future__ import annotations

import torch
from torch import Tensor


class _Memory:
    """Device memory by CUDA's array interface (`__cuda_array_interface__`), as integers."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "typestr": f"<i{tensor.itemsize}",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def alias(tensor: Tensor) -> Tensor:
    """Returns a tensor on the memory of `tensor` (CUDA, 16 or 32 bits) that does not keep the memory allocated.

    It is for the results of a captured graph. They are read before the next graph is replayed, so all graphs can share
    their memory.
    """
    assert tensor.itemsize in (2, 4), tensor.dtype
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
