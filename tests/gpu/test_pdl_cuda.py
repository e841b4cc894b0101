"""Kernels that start early read and write the same as kernels that start one after another."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.beside import Fork
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from support.cuda import captured

pytestmark = pytest.mark.gpu

ROWS, BLOCK = 64, 128  # few programs, so that several kernels run at a time


@triton.jit
def _slow_sum(a, b, out, NS: tl.constexpr, BLOCK: tl.constexpr):
    """Computes out = a + 2 b: reads at once, writes NS nanoseconds later."""
    wait_for_previous()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    result = tl.load(a + at) + 2 * tl.load(b + at)
    begin = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - begin < NS:
        pass
    tl.store(out + at, result)


def slow_sum(a: Tensor, b: Tensor, out: Tensor, ns: int = 20_000) -> Tensor:
    _slow_sum[(ROWS,)](a, b, out, NS=ns, BLOCK=BLOCK, **launch_options())
    return out


def chain(x: Tensor) -> Tensor:
    """Few buffers, each overwritten soon after it is read; slow kernels before fast ones; one kernel of torch, and two
    streams."""
    buffers = [torch.zeros_like(x) for _ in range(3)]
    first, second, third = buffers
    for _ in range(4):
        slow_sum(x, first, second)
        slow_sum(second, x, first, ns=0)
        slow_sum(first, second, third)
        slow_sum(third, third, second, ns=0)
        first.copy_(second).remainder_(1009)
        other = Fork(first).start(lambda x: slow_sum(x, x, torch.empty_like(x)))
        slow_sum(first, third, second, ns=5000)
        slow_sum(second, other(), first, ns=0).remainder_(1009)
    return first


def test_memory_that_the_second_stream_reads_is_kept() -> None:
    x = torch.arange(ROWS * BLOCK, device="cuda").view(ROWS, BLOCK)
    zero = torch.zeros_like(x)

    def late(x: Tensor) -> Tensor:
        return slow_sum(x, slow_sum(zero, zero, torch.empty_like(x)), torch.empty_like(x))

    late(x)  # compiles
    torch.cuda.synchronize()
    result = Fork(x + 1).start(late)
    others = [torch.full_like(x, 7) for _ in range(8)]  # in freed memory
    assert torch.equal(result(), x + 1)
    assert all((other == 7).all() for other in others)


@triton.jit
def _row_of(table, at, previous, out, BLOCK: tl.constexpr):
    """Computes out = previous + the row of the table at the index `at`. Index and table are read before the wait."""
    row = tl.load(table + tl.load(at) * BLOCK + tl.arange(0, BLOCK))
    wait_for_previous()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, row + tl.load(previous + place))


@pytest.mark.parametrize("capture", [False, True])
def test_settled_tensors_can_be_read_early(capture: bool) -> None:
    """A slow kernel writes them before a kernel of torch, behind which all kernels start early."""
    x = torch.arange(ROWS * BLOCK, device="cuda").view(ROWS, BLOCK)
    zero, at = torch.zeros_like(x), torch.tensor(5, device="cuda")

    def step() -> Tensor:
        table = slow_sum(x, zero, torch.empty_like(x))
        one = x + 1
        two = slow_sum(one, zero, torch.empty_like(x))
        out = torch.empty_like(x)
        _row_of[(ROWS,)](table, at, two, out, BLOCK=BLOCK, **launch_options())
        return out

    replay, output = captured(step) if capture else (None, None)
    for turn in range(20):
        x.add_(turn)
        if replay is None or output is None:
            result = step()
        else:
            replay()
            result = output
        assert torch.equal(result, x + 1 + x[5])


def expected_chain(x: Tensor) -> Tensor:
    first = torch.zeros_like(x)
    for _ in range(4):
        second = x + 2 * first
        first = second + 2 * x
        third = first + 2 * second
        first = (3 * third) % 1009
        first = (first + 2 * third + 2 * 3 * first) % 1009
    return first


@pytest.mark.parametrize("capture", [False, True])
def test_a_chain(capture: bool) -> None:
    x = torch.arange(ROWS * BLOCK, device="cuda").view(ROWS, BLOCK)
    replay, output = captured(lambda: chain(x)) if capture else (None, None)
    for step in range(20):
        x.add_(step)
        if replay is None or output is None:
            result = chain(x)
        else:
            replay()
            result = output
        assert torch.equal(result, expected_chain(x))
