"""What the server processes of a worker know of each other, in memory that they share.

Each has a row of its own, which it alone writes, and all read all rows. So whoever is asked knows the
sums of what they count at once, however busy the others are, and a count costs no message and no lock.
"""

from __future__ import annotations

import mmap
import os
import weakref

ROW_BYTES = 4096  # a page, so that no two processes write to the same cache line
FLOAT_BYTES = 8


class Cells:
    """Some neighbouring float64 of each row."""

    __slots__ = ("_rows", "own")

    def __init__(self, rows: list[memoryview[float]], own: int) -> None:
        self._rows = rows
        self.own = rows[own]

    def lowest(self) -> float:
        """Of all rows, the least value of the first cell."""
        return min(row[0] for row in self._rows)

    def totals(self) -> list[float]:
        """The sum over all rows, of each cell."""
        return [sum(cells) for cells in zip(*self._rows, strict=True)]


class Count:
    """One cell that goes up, and down where it says how much there is."""

    __slots__ = ("_cells", "_own")

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._own = cells.own

    def inc(self) -> None:
        self._own[0] += 1

    def add(self, value: float) -> None:
        self._own[0] += value

    def set(self, value: float) -> None:
        """What there is in this process."""
        self._own[0] = value

    @property
    def own(self) -> float:
        """What there is in this process."""
        return self._own[0]

    @property
    def total(self) -> float:
        """What there is in all of them."""
        return self._cells.totals()[0]


class SharedCounters:
    """Cells are handed out in order: the processes must ask for the same ones in the same order."""

    def __init__(self, descriptor: int, rows: int, own: int) -> None:
        """The memory behind `descriptor`, of which row `own` is ours."""
        self.descriptor = descriptor
        memory = memoryview(mmap.mmap(descriptor, rows * ROW_BYTES))
        self._rows = [
            memory[row * ROW_BYTES : (row + 1) * ROW_BYTES].cast("d") for row in range(rows)
        ]
        self._own = own
        self._used = 0

    @classmethod
    def create(cls, rows: int = 1) -> SharedCounters:
        """New memory, which lasts as long as somebody has it; we are the first row."""
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
