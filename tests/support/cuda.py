"""Helpers of tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@contextmanager
def forbid_waiting() -> Iterator[None]:
    """Raises inside at each call that makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call: Callable[[], T]) -> tuple[Callable[[], None], T]:
    """Captures `call` in a CUDA graph. Returns the replay function, and the result that a replay writes."""
    call()  # compiles, which a capture does not permit
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


def assert_rows_close(got: Tensor, expected: Tensor, most: float = 1e-2) -> None:
    """Compares the norm of each row's difference, because single numbers near 0 are mostly rounding."""
    error = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max().item() < most, error  # NaN fails, too
