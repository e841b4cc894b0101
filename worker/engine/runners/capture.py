"""Captures CUDA graphs of several sizes in one memory pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from tqdm import tqdm

logger = logging.getLogger(__name__)

G = TypeVar("G")


def capture_sizes(
    kind: str, capture: Callable[[int, Any], G], sizes: Sequence[int], device: torch.device
) -> dict[int, G]:
    """Calls `capture(size, pool)` for each size and returns the results by size. All graphs share the memory pool,
    because only one graph of a kind runs at a time. Logs the time and the memory used."""
    if not sizes:
        return {}
    begin, free = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
    pool = torch.cuda.graph_pool_handle()
    # The largest graph first: the others fit into its memory
    progress = tqdm(sorted(sizes, reverse=True), desc=f"Capturing {kind}s", disable=None)
    graphs = {size: capture(size, pool) for size in progress}
    logger.info(
        "Captured %ss of %d sizes up to %d: %.1f s, %.0f MB",
        kind,
        len(sizes),
        max(sizes),
        time.perf_counter() - begin,
        (free - torch.cuda.mem_get_info(device)[0]) / 1e6,
    )
    return graphs


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
