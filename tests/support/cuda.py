"""For tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

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
