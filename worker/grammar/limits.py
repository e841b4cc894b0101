"""Limits that the kernel enforces on a process.

They count CPU time and not wall time, so that a busy machine does not fail a grammar.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

PAGE_BYTES = resource.getpagesize()


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """SIGPROF ends the process if the block takes more CPU time than `seconds`.

    The signal has its default action and needs no Python code, so it also ends a loop in C++.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_memory(more_bytes: int) -> None:
    """Limits the address space to `more_bytes` beyond its current size. Later allocations fail. A later call sets a new
    limit."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * PAGE_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more_bytes, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def own_bytes() -> int:
    """Returns the private memory of this process in bytes."""
    with open("/proc/self/smaps_rollup") as rollup:
        lines = [line.split() for line in rollup]
    return sum(int(line[1]) << 10 for line in lines if line[0] == "Private_Dirty:")


class Allowance:
    """The CPU time that a grammar may use for masks: a token bucket, in seconds."""

    def __init__(self, burst: float) -> None:
        self._burst = burst
        self.left = burst

    def add(self, seconds: float) -> None:
        self.left = min(self._burst, self.left + seconds)

    def spend(self, seconds: float) -> None:
        # At least a timer's resolution: 0 would switch the limit off.
        self.left = max(0.001, self.left - seconds)
