"""Measures the time of GPU work, and computes its floor.

Times are device times between two CUDA events, unless named host times. The first call, which compiles, is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from mla_router.worker.kernels.carveout import prefer_shared_memory

prefer_shared_memory()  # as the engine does, before any kernel is loaded

# Of one H200, measured: a read of device memory, and cuBLAS's bf16 product of 8192-cubed.
H200_BYTES_PER_SECOND = 4.34e12
H200_BF16_FLOPS = 748e12

# Five times the L2 of an H200 (50 MB): writing it evicts all inputs.
FLUSH_BYTES = 256 << 20

PAUSE_CYCLES = 600_000  # about 0.3 ms


def time_us(fn: Callable[[], object], *, budget_ms: float = 60, max_runs: int = 200) -> float:
    """Returns the median time of one `fn()` in us, with a cold L2.

    It runs as often as `budget_ms` of device time allows, between 5 and `max_runs` times. The eviction of the L2 and a
    pause keep the device busy for about 0.4 ms, in which the host queues the launches of `fn`: about ten launches from
    Python have no gaps. For more launches use `time_graph_us`.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    fn()
    estimate = _timed([fn] * 3, flush)
    runs = min(max(int(budget_ms * 1000 / (max(estimate) + 400)), 5), max_runs)
    return statistics.median(_timed([fn] * runs, flush))


def time_graph_us(fn: Callable[[], object], *, launches: int = 20, replays: int = 10) -> float:
    """Returns the median time in us of one of `launches` consecutive calls of `fn` in a CUDA graph.

    This is the situation in a captured decode step: no launch gaps, and data of the previous call may be in L2.
    """
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            fn()
    graph.replay()
    return statistics.median(_timed([graph.replay] * replays)) / launches


def time_host_us(fn: Callable[[], object], *, runs: int = 50) -> float:
    """Returns the median host time of one `fn()` in us, with an idle device."""
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        fn()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def floor_us(*, moved_bytes: float = 0, flops: float = 0) -> float:
    """Returns the floor in us: the time of one H200 for so many bytes and bf16 operations."""
    return max(moved_bytes / H200_BYTES_PER_SECOND, flops / H200_BF16_FLOPS) * 1e6


def _timed(calls: list[Callable[[], object]], flush: torch.Tensor | None = None) -> list[float]:
    """Returns the time of each call in us. The host waits for the device only at the end."""
    events = []
    for call in calls:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if flush is not None:
            flush.zero_()
            torch.cuda._sleep(PAUSE_CYCLES)
        start.record()
        call()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 for start, end in events]
