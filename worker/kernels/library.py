"""x @ weight.T by NVIDIA's libraries: cuBLAS, or cuBLASLt where it is faster.

torch takes cuBLAS unless told otherwise. With 65 to 128 rows, few outputs and many inputs cuBLASLt divides the inputs
better: Llama 3 8B's last product of a layer, 4,096 outputs of 14,336 inputs, takes 46.3 us instead of 53.9 for 128 rows
on an H100. Its other products take the same with both (`docs/design/kernel_choices.md`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from mla_router.worker.kernels.dispatch import is_hopper
from mla_router.worker.kernels.linear_hopper import MAX_ROWS

ROWS = range(MAX_ROWS + 1, 129)
LARGE = 1 << 24  # numbers of the smallest weight that was measured
INPUTS_OF_AN_OUTPUT = 2  # measured with 3.5 and with 1, where both libraries take the same


def suits_cublaslt(rows: int, outputs: int, inputs: int) -> bool:
    """Whether cuBLASLt is faster than cuBLAS for weight [outputs, inputs]."""
    many_inputs = inputs >= INPUTS_OF_AN_OUTPUT * outputs
    return rows in ROWS and many_inputs and outputs * inputs >= LARGE


def library_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x @ weight.T + bias [T, N] in the dtype of x [T, K], weight [N, K] and bias [N], on a GPU."""
    if is_hopper(x.device) and suits_cublaslt(len(x), *weight.shape):
        with _cublaslt():
            return functional.linear(x, weight, bias)
    return functional.linear(x, weight, bias)


@contextmanager
def _cublaslt() -> Iterator[None]:
    """Makes torch take cuBLASLt, with a warning of torch's once in a process. A replayed graph does not do this again."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
