"""Limits that the kernel enforces on a process, whatever the code in it does.

CPU time and not seconds on the wall: a grammar is not to blame for a busy machine.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

PAGE_BYTES = resource.getpagesize()


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """The process is ended by SIGPROF if the block takes more CPU time than this.

    Nothing in the process can prevent it, because nobody handles the signal; no Python is needed
    for it, so that it also ends a loop in C++.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_memory(more_bytes: int) -> None:
    """From now on the process may map so many bytes more than it has now; then allocations fail.
    A later call counts anew."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * PAGE_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more_bytes, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def own_bytes() -> int:
    """Memory of this process that it shares with no other one."""
    with open("/proc/self/smaps_rollup") as rollup:
        lines = [line.split() for line in rollup]
    return sum(int(line[1]) << 10 for line in lines if line[0] == "Private_Dirty:")


class Allowance:
    """CPU time that a grammar may take for masks: so much on average, more at times.

    A token bucket, in seconds.
    """

    def __init__(self, burst: float) -> None:
        self._burst = burst
        self.left = burst

    def add(self, seconds: float) -> None:
        self.left = min(self._burst, self.left + seconds)

    def spend(self, seconds: float) -> None:
        # Not below a timer's resolution: an allowance of 0 would switch the limit off.
        self.left = max(0.001, self.left - seconds)
