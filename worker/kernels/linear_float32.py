"""A projection whose results must be sharper than its operands: scores that are compared."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.dispatch import on_gpu


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, [T, N] float32, for x [T, K] and weight [N, K] of one dtype.

    Products are summed in float32 and never rounded to the dtype of x, which would make ties of
    scores that differ.
    """
    if on_gpu(x):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.nn.functional.linear(x.float(), weight.float())
