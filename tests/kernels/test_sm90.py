"""The check of compiled kernels finds faults."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from support.compiler_process import CompilationFailed
from support.sm90 import compile_sm90


@triton.jit
def _matmul_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    product = tl.dot(
        tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :])
    )
    tl.store(out + m[:, None] * N + n[None, :], product)


def matmul(m: int, n: int, k: int, num_warps: int) -> None:
    a, b = torch.empty(2, m * n * k, dtype=torch.bfloat16, device="meta")
    _matmul_kernel[(1,)](a, b, b.float(), M=m, N=n, K=k, num_warps=num_warps)


def launches() -> None:
    matmul(64, 64, 64, 4)
    matmul(64, 64, 64, 4)  # the same again
    matmul(128, 256, 16, 4)  # 256 registers of each thread for the sums alone
    matmul(64, 64, 1024, 4)  # 256 KiB of operands
    matmul(16, 16, 16, 1)  # too few rows for wgmma


def test_reports() -> None:
    plain, spilling, large, small = compile_sm90(launches)
    plain.check()
    assert plain.kernel == "_matmul_kernel"
    assert plain.constants == {"M": 64, "N": 64, "K": 64}
    assert plain.num_warps == 4
    assert 32 < plain.registers < 256
    assert plain.shared_bytes >= 2 * 64 * 64 * 2
    assert [report.has_wgmma for report in (plain, spilling, large, small)] == [True] * 3 + [False]
    with pytest.raises(AssertionError, match="spills: "):
        spilling.check()
    with pytest.raises(AssertionError, match="more shared memory than there is: "):
        large.check()


def waiting() -> None:
    torch.ones(1, device="meta").item()


def test_a_launcher_that_waits_for_the_device_is_refused() -> None:
    with pytest.raises(CompilationFailed, match="meta tensors"):
        compile_sm90(waiting)
