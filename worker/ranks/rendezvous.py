"""The rendezvous of a worker's ranks at their start, in a torch FileStore.

Each rank reports its arrival, and later that its engine is loaded. A rank that does not come within the time limit is an
error on the ranks that wait for it.

The store is anonymous memory whose descriptor the processes inherit: it has no name and no port, and ends with them.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import FileStore

from mla_router.worker.ranks.errors import RanksError


def store_path(descriptor: int) -> Path:
    """Returns the path of an inherited file, for this process."""
    return Path(f"/proc/self/fd/{descriptor}")


class Rendezvous:
    """The view of one rank."""

    def __init__(self, store: Path, rank: int, size: int, *, timeout_s: float) -> None:
        """Reports the arrival of `rank`, one of `size`. `timeout_s`: limit of each wait."""
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._store = FileStore(str(store), size)
        self._report("arrived")

    def all_arrived(self) -> None:
        """Waits until all ranks have started. Raises RanksError."""
        self._wait("arrived", "not started")

    def report_loaded(self) -> None:
        """Reports that this rank can run calls."""
        self._report("loaded")

    def all_loaded(self) -> None:
        """Waits until all ranks can run calls. Raises RanksError."""
        self._wait("loaded", "not loaded the model")

    def _report(self, event: str) -> None:
        self._store.set(f"{event}/{self._rank}", str(os.getpid()))

    def _wait(self, event: str, problem: str) -> None:
        keys = {rank: f"{event}/{rank}" for rank in range(self._size)}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            late = [rank for rank, key in keys.items() if not self._store.check([key])]
            names = " and ".join(f"rank {rank}" for rank in late)
            raise RanksError(
                f"after {self._timeout_s:g} s (--dist-timeout) {names} of {self._size} ranks "
                f"{'has' if len(late) == 1 else 'have'} {problem}; its log lines begin with its name"
            ) from error
