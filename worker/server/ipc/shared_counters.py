"""Counters of all API processes of a worker, in shared memory.

Each process writes its own row and reads all rows. So every process can return the sums at once, even if the others are
busy, and counting needs no message and no lock.
"""

from __future__ import annotations

import mmap
import os
import weakref

ROW_BYTES = 4096  # a page, so that no two processes write to the same cache line
FLOAT_BYTES = 8


class Cells:
    """Adjacent float64 cells, at the same place in each row."""

    __slots__ = ("_rows", "own")

    def __init__(self, rows: list[memoryview[float]], own: int) -> None:
        self._rows = rows
        self.own = rows[own]

    def lowest(self) -> float:
        """Returns the minimum of the first cell over all rows."""
        return min(row[0] for row in self._rows)

    def totals(self) -> list[float]:
        """Returns the sum of each cell over all rows."""
        return [sum(cells) for cells in zip(*self._rows, strict=True)]


class Count:
    """One cell: a counter or a gauge."""

    __slots__ = ("_cells", "_own")

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._own = cells.own

    def inc(self) -> None:
        self._own[0] += 1

    def add(self, value: float) -> None:
        self._own[0] += value

    def set(self, value: float) -> None:
        """Sets the value of this process."""
        self._own[0] = value

    @property
    def own(self) -> float:
        """The value of this process."""
        return self._own[0]

    @property
    def total(self) -> float:
        """The sum over all processes."""
        return self._cells.totals()[0]


class SharedCounters:
    """The memory. All processes must allocate the same cells in the same order."""

    def __init__(self, descriptor: int, rows: int, own: int) -> None:
        """Maps the memory of `descriptor`. `own` is the row of this process."""
        self.descriptor = descriptor
        memory = memoryview(mmap.mmap(descriptor, rows * ROW_BYTES))
        self._rows = [
            memory[row * ROW_BYTES : (row + 1) * ROW_BYTES].cast("d") for row in range(rows)
        ]
        self._own = own
        self._used = 0

    @classmethod
    def create(cls, rows: int = 1) -> SharedCounters:
        """Creates new memory. It lasts until the last process has closed it. This process has row 0."""
        descriptor = os.memfd_create("mla-router-counters")
        os.ftruncate(descriptor, rows * ROW_BYTES)
        counters = cls(descriptor, rows, 0)
        weakref.finalize(counters, os.close, descriptor)
        return counters

    def cells(self, count: int) -> Cells:
        begin, self._used = self._used, self._used + count
        assert self._used * FLOAT_BYTES <= ROW_BYTES, f"{self._used} cells do not fit in a row"
        return Cells([row[begin : self._used] for row in self._rows], self._own)

    def count(self) -> Count:
        return Count(self.cells(1))
