"""What is launched to bring weights into L2."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.kernels.prefetch import PIECE_BYTES, fetch, prefetch_triton
from support.sm90 import compile_sm90


@triton.jit
def _fetching_ahead(x, N: tl.constexpr):
    fetch(x, N * 4)
    wait_for_previous()
    at = x + tl.arange(0, N)
    tl.store(at, tl.load(at) + 1)


@triton.jit
def _fetching_and_reading_ahead(x, N: tl.constexpr):
    fetch(x, N * 4)
    at = x + tl.arange(0, N)
    ahead = tl.load(at)
    wait_for_previous()
    tl.store(at, ahead + 1)


def launches() -> None:
    x = torch.empty(1024, device="meta")
    for kernel in (_fetching_ahead, _fetching_and_reading_ahead):
        kernel[(1,)](x, N=128, **launch_options())
    prefetch_triton(torch.empty(5632, 2048, dtype=torch.bfloat16, device="meta"), 20 << 20)


def test_only_a_prefetch_may_come_before_the_wait() -> None:
    fetching, reading, alone = compile_sm90(launches)
    fetching.check()
    assert fetching.waits_first and fetching.starts_early
    with pytest.raises(AssertionError, match="does not wait for the last"):
        reading.check()
    alone.check()
    assert alone.constants == {"PIECE": PIECE_BYTES}
    assert not alone.starts_early


def test_more_than_there_is_or_in_pieces() -> None:
    weight = torch.empty(4, 8)
    with pytest.raises(AssertionError, match="129 bytes"):
        prefetch_triton(weight, 129)
    with pytest.raises(AssertionError, match=r"strides?|weight \(8, 4\)"):
        prefetch_triton(weight.T, 16)
