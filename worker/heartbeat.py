"""The heartbeats of a worker's ranks: counters in shared memory, which its server processes read. The server processes have
such heartbeats as well, in memory of their own.

Each rank has a page. The scheduler, which is rank 0, writes the first one. A heartbeat costs a few stores to memory a
step. The servers read the pages without help, so they also find a process that is stopped or hangs in a step.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

_BYTES = mmap.PAGESIZE
MAX_RANKS = 64
_PID, _COUNT, _LAST, _HAS_WORK, _PAUSED, _EXPECTED, _FROZEN, _REPORTED = range(8)
SILENT_S = 10.0  # without a report of a rank on another node


class Heartbeat:
    """A page of shared memory with one writer, the process of a rank, and any number of readers."""

    def __init__(self, descriptor: int, rank: int = 0) -> None:
        """Maps the page of `rank` in the memory behind the file descriptor."""
        self.descriptor = descriptor
        page = mmap.mmap(descriptor, _BYTES, offset=rank * _BYTES)
        self._cells = memoryview(page).cast("d")

    @classmethod
    def create(cls, pages: int = MAX_RANKS) -> Heartbeat:
        """Allocates pages, which last until every process has closed the descriptor. Returns the heartbeat of rank 0."""
        heartbeat = cls(cls.allocate(pages))
        weakref.finalize(heartbeat, os.close, heartbeat.descriptor)
        return heartbeat

    @staticmethod
    def allocate(pages: int = MAX_RANKS) -> int:
        """Allocates the pages of that many ranks, and returns their descriptor. The kernel gives memory to those that are
        written."""
        descriptor = os.memfd_create("mla-router-heartbeat")
        os.ftruncate(descriptor, pages * _BYTES)
        return descriptor

    def of_rank(self, rank: int) -> Heartbeat:
        """Returns the heartbeat of another rank, which is valid as long as this one."""
        return Heartbeat(self.descriptor, rank)

    # -- written by the rank ------------------------------------------------------------------------

    def start(self) -> None:
        """Registers this process as the rank's. From now on heartbeats are expected."""
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
        """Expects no heartbeats inside: the process waits for other processes, or does something long on purpose."""
        self._cells[_PAUSED] = 1
        try:
            yield
        finally:
            self._cells[_PAUSED] = 0
            self.update()

    # -- written for a rank on another node -------------------------------------------------------

    def report(self, age_s: float, *, is_frozen: bool) -> None:
        """Records the report of the rank's node: seconds since the last heartbeat, and whether the rank is frozen. The
        page has no process id, because the process is on another machine."""
        now = time.monotonic()
        self._cells[_LAST], self._cells[_FROZEN] = now - age_s, is_frozen
        self._cells[_REPORTED] = now

    def mirror(self, *, serves: bool, expected_s: float) -> None:
        """Records the state of rank 0 on another node, for the ranks of this one. Its process id is that of this
        process."""
        self.expect(expected_s)
        self._cells[_PID] = os.getpid() if serves else 0

    @property
    def is_reported_frozen(self) -> bool:
        """Whether the rank's node reports that it is frozen, or has stopped its reports."""
        reported = self._cells[_REPORTED]
        is_silent = 0 < reported < time.monotonic() - SILENT_S
        return bool(self._cells[_FROZEN]) or is_silent

    # -- read by the servers ----------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The process id of the rank; 0 before its first heartbeat."""
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
