"""For tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@contextmanager
def forbid_waiting() -> Iterator[None]:
    """Any call that would make the host wait for the device raises inside."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call: Callable[[], T]) -> tuple[Callable[[], None], T]:
    """`call` captured in a CUDA graph: what replays it, and the result that replaying writes."""
    call()  # compiles, which a capture does not allow
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


def assert_rows_close(got: Tensor, expected: Tensor, most: float = 1e-2) -> None:
    """By the norm of each row's difference: single numbers near 0 are nothing but rounding."""
    error = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max().item() < most, error  # NaN fails, too
