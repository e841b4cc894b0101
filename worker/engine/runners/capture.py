"""Captures CUDA graphs of several sizes in one memory pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from tqdm import tqdm

G = TypeVar("G")


def capture_sizes(
    kind: str, capture: Callable[[int, Any], G], sizes: Sequence[int]
) -> dict[int, G]:
    """Calls `capture(size, pool)` for each size and returns the results by size. All graphs share the memory pool,
    because only one graph of a kind runs at a time."""
    if not sizes:
        return {}
    pool = torch.cuda.graph_pool_handle()
    # The largest graph first: the others fit into its memory
    progress = tqdm(sorted(sizes, reverse=True), desc=f"Capturing {kind}s", disable=None)
    return {size: capture(size, pool) for size in progress}


def capture(
    run: Callable[[], G], pool: Any, device: torch.device
) -> tuple[torch.cuda.CUDAGraph, G]:
    """Returns the graph of `run`, and the result that a replay overwrites."""
    run()  # compiles kernels and sets up libraries, which a capture does not permit
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run()
    return graph, result
