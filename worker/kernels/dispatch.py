"""The choice between torch and a kernel."""

from __future__ import annotations

import torch

from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.weight import Activations


def on_gpu(x: Activations, dtype: torch.dtype | None = None) -> bool:
    """Whether an op on `x` launches its kernel: for arithmetic with 16-bit numbers on a GPU. Other tensors take plain
    torch operations, which are the definition of the op. So do ops inside torch.compile. `dtype`: of the
    arithmetic, by default that of `x`."""
    return (
        x.is_cuda
        and (dtype or x.dtype) in (torch.bfloat16, torch.float16)
        and not torch.compiler.is_compiling()
    )


def is_hopper(device: torch.device) -> bool:
    """Whether `device` has the tensor cores of sm_90, which Gluon kernels use."""
    return device.type == "cuda" and limits(device).is_hopper
