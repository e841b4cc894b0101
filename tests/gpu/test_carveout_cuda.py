"""CUDA's division of on-chip memory for a kernel that Triton has loaded."""

from __future__ import annotations

import ctypes

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from mla_router.worker.kernels import carveout
from mla_router.worker.kernels.carveout import PREFERRED_SHARED_MEMORY_CARVEOUT

pytestmark = pytest.mark.gpu


@triton.jit
def _next(x, N: tl.constexpr):
    at = x + tl.arange(0, N)
    tl.store(at, tl.load(at) + 1)


def carveout_of(kernel: object) -> int:
    value = ctypes.c_int()
    function = ctypes.c_void_p(kernel.function)  # type: ignore[attr-defined]
    code = ctypes.CDLL("libcuda.so.1").cuFuncGetAttribute(
        ctypes.byref(value), PREFERRED_SHARED_MEMORY_CARVEOUT, function
    )
    assert code == 0
    return value.value


def test_all_for_shared_memory() -> None:
    x = torch.zeros(128, device="cuda")
    before = _next[(1,)](x, N=64)
    carveout.prefer_shared_memory()
    try:
        after = _next[(1,)](x, N=128)
    finally:
        knobs.runtime.kernel_load_end_hook.remove(carveout._prefer)
    assert carveout_of(before) == -1  # CUDA's choice
    assert carveout_of(after) == 100
    assert x.tolist() == [2.0] * 64 + [1.0] * 64
