"""Which tensors the kernels are for."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.device import limits


def on_gpu(x: Tensor) -> bool:
    """Whether `x` goes the fast way: 16-bit numbers on a GPU. All else takes the way of plain torch
    operations, which the fast one is checked against. So does what torch.compile is to look into."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and not torch.compiler.is_compiling()
    )


def is_hopper(device: torch.device) -> bool:
    """Whether it has the tensor cores that kernels in Gluon are for (sm_90)."""
    return device.type == "cuda" and limits(device).is_hopper
