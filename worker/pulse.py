"""The scheduler's pulse: a page of memory in which it says that it makes progress, for its servers to read.

It costs the scheduler some stores to memory a step, and is read without its help: so a scheduler that is
stopped, or hangs in a step, is found by its pulse while it can say nothing.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

_BYTES = 4096
_PID, _BEATS, _LAST, _HAS_WORK, _WAITS, _EXPECTED = range(6)


class Pulse:
    """One writer, the scheduler, and any readers."""

    def __init__(self, descriptor: int) -> None:
        """The memory behind `descriptor`."""
        self.descriptor = descriptor
        self._cells = memoryview(mmap.mmap(descriptor, _BYTES)).cast("d")

    @classmethod
    def create(cls) -> Pulse:
        """New memory, which lasts as long as a process has it."""
        descriptor = os.memfd_create("mla-router-pulse")
        os.ftruncate(descriptor, _BYTES)
        pulse = cls(descriptor)
        weakref.finalize(pulse, os.close, descriptor)
        return pulse

    # -- the scheduler's side ---------------------------------------------------------------------

    def start(self) -> None:
        """This process is the scheduler, and beats from now on."""
        self.beat(has_work=False)
        self._cells[_PID] = os.getpid()

    def beat(self, *, has_work: bool = True) -> None:
        """There was progress: a step, a part of one, or a look at the messages."""
        cells = self._cells
        cells[_HAS_WORK] = has_work
        cells[_LAST] = time.monotonic()
        cells[_BEATS] += 1

    def expect(self, seconds: float) -> None:
        """The steps that are under way should take so long: the next beats may be that late."""
        self._cells[_EXPECTED] = seconds

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Inside, no beats are due: other processes are waited for, or something long is done on purpose."""
        self._cells[_WAITS] = 1
        try:
            yield
        finally:
            self._cells[_WAITS] = 0
            self.beat()

    # -- the servers' side ------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The scheduler's process; 0 before it beats."""
        return int(self._cells[_PID])

    @property
    def beats(self) -> float:
        return self._cells[_BEATS]

    @property
    def has_work(self) -> bool:
        return bool(self._cells[_HAS_WORK])

    @property
    def is_waiting(self) -> bool:
        return bool(self._cells[_WAITS])

    @property
    def expected_s(self) -> float:
        """Seconds that the steps under way should take."""
        return self._cells[_EXPECTED]

    @property
    def age(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self._cells[_LAST]
