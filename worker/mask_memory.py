"""The token bitmasks of the last steps, in shared memory: grammar workers write them, and all ranks of a worker read them.

Steps use `STEPS` regions in turn: two steps may be in flight when a third one begins. Before that rank 0 has waited for the
results of the first one, whose exchanges need all ranks, so the other ranks have read the bitmasks of the steps before it.
Each region has the number of its step, by which a reader that is late notices it.
"""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np

STEPS = 3
# In front of the regions: the numbers of their steps
_HEADER = mmap.PAGESIZE


class MaskMemory:
    """Maps the memory of a file descriptor. One process begins steps."""

    def __init__(self, descriptor: int, max_rows: int, vocab_size: int) -> None:
        """Steps have up to `max_rows` rows. All processes must give the same sizes. The kernel gives memory to pages that
        are written."""
        words = -(-vocab_size // 32)
        size = _HEADER + STEPS * max_rows * words * 4
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        self.descriptor = descriptor
        self.max_rows = max_rows
        # The rows of all regions, [STEPS * max_rows, words]
        self.rows = np.frombuffer(memory, dtype=np.int32, offset=_HEADER).reshape(-1, words)
        self._numbers = np.frombuffer(memory, dtype=np.int64, count=STEPS)

    @classmethod
    def create(cls, max_rows: int, vocab_size: int) -> MaskMemory:
        """Allocates memory, whose descriptor lasts as long as the returned object."""
        memory = cls(os.memfd_create("mla-router-masks"), max_rows, vocab_size)
        weakref.finalize(memory, os.close, memory.descriptor)
        return memory

    def begin(self) -> int:
        """Begins a step in the region of the oldest one. Returns its number."""
        step = int(self._numbers.max()) + 1
        self._numbers[step % STEPS] = step
        return step

    def first_row(self, step: int) -> int:
        """Returns the index in `rows` of the first bitmask of a step."""
        return step % STEPS * self.max_rows

    def of(self, step: int) -> np.ndarray:
        """Returns the bitmasks [max_rows, words] of a step, without a copy."""
        first = self.first_row(step)
        return self.rows[first : first + self.max_rows]

    def put(self, step: int, bits: bytes) -> None:
        """Writes the bitmasks of a step that began on another machine. Raises ValueError if they do not fit."""
        row = self.rows.shape[1] * 4
        count, rest = divmod(len(bits), row)
        if step <= 0 or rest or count > self.max_rows:
            raise ValueError(f"token bitmasks of {len(bits)} bytes for step {step}")
        self._numbers[step % STEPS] = step
        self.of(step)[:count] = np.frombuffer(bits, dtype="<i4").reshape(count, -1)

    def has(self, step: int) -> bool:
        """Whether the bitmasks of a step are still there."""
        return step > 0 and bool(self._numbers[step % STEPS] == step)
