"""The scheduler's heartbeat: counters in a page of shared memory, which its server processes read.

A heartbeat costs the scheduler a few stores to memory a step. The servers read the page without the
scheduler's help, so they also find a scheduler that is stopped or hangs in a step.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

_BYTES = 4096
_PID, _COUNT, _LAST, _HAS_WORK, _PAUSED, _EXPECTED = range(6)


class Heartbeat:
    """Shared memory with one writer, the scheduler, and any number of readers."""

    def __init__(self, descriptor: int) -> None:
        """Maps the memory behind the file descriptor."""
        self.descriptor = descriptor
        self._cells = memoryview(mmap.mmap(descriptor, _BYTES)).cast("d")

    @classmethod
    def create(cls) -> Heartbeat:
        """Allocates memory that lasts until every process has closed its descriptor."""
        descriptor = os.memfd_create("mla-router-heartbeat")
        os.ftruncate(descriptor, _BYTES)
        heartbeat = cls(descriptor)
        weakref.finalize(heartbeat, os.close, descriptor)
        return heartbeat

    # -- written by the scheduler -----------------------------------------------------------------

    def start(self) -> None:
        """Registers this process as the scheduler. From now on heartbeats are expected."""
        self.update(has_work=False)
        self._cells[_PID] = os.getpid()

    def update(self, *, has_work: bool = True) -> None:
        """Records progress: a step, a part of a step, or a look at the messages."""
        cells = self._cells
        cells[_HAS_WORK] = has_work
        cells[_LAST] = time.monotonic()
        cells[_COUNT] += 1

    def expect(self, seconds: float) -> None:
        """Records the expected time of the steps in flight: the next heartbeat may be that late."""
        self._cells[_EXPECTED] = seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Expects no heartbeats inside: the scheduler waits for other processes, or does something long on purpose."""
        self._cells[_PAUSED] = 1
        try:
            yield
        finally:
            self._cells[_PAUSED] = 0
            self.update()

    # -- read by the servers ----------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The scheduler's process id; 0 before its first heartbeat."""
        return int(self._cells[_PID])

    @property
    def count(self) -> float:
        """Heartbeats so far."""
        return self._cells[_COUNT]

    @property
    def has_work(self) -> bool:
        return bool(self._cells[_HAS_WORK])

    @property
    def is_paused(self) -> bool:
        return bool(self._cells[_PAUSED])

    @property
    def expected_s(self) -> float:
        """Seconds that the steps in flight should take."""
        return self._cells[_EXPECTED]

    @property
    def age(self) -> float:
        """Seconds since the last heartbeat."""
        return time.monotonic() - self._cells[_LAST]
