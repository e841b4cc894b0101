"""The rendezvous of a worker's ranks at their start, in the store of `stores.py`.

Each rank reports its arrival, and later that its engine is loaded. A rank that does not come within the time limit is an
error on the ranks that wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError

from mla_router.worker.ranks.errors import RanksError

_LOST = "rank 0, which keeps the store of the rendezvous, has ended; its own log lines say why"


class Rendezvous:
    """The view of one rank."""

    def __init__(
        self, store: Store, rank: int, size: int, *, timeout_s: float, nodes: int = 1
    ) -> None:
        """Reports the arrival of `rank`, one of `size` on `nodes` machines. `timeout_s`: limit of each wait."""
        self._rank = rank
        self._size = size
        self._ranks_a_node = size // nodes
        self._timeout_s = timeout_s
        self._store = store
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

    def tell(self, name: str, value: str) -> None:
        """Tells the other ranks a value."""
        self._store.set(f"told/{name}", value)

    def told(self, name: str) -> str:
        """Waits for a value that another rank tells, and returns it. Raises RanksError."""
        try:
            self._store.wait([f"told/{name}"], timedelta(seconds=self._timeout_s))
        except DistNetworkError as error:
            raise RanksError(_LOST) from error
        except RuntimeError as error:
            raise RanksError(
                f"after {self._timeout_s:g} s (--dist-timeout) no rank has told {name}"
            ) from error
        return self._store.get(f"told/{name}").decode(errors="replace")

    def _report(self, event: str) -> None:
        self._store.set(f"{event}/{self._rank}", str(os.getpid()))

    def _wait(self, event: str, problem: str) -> None:
        keys = {rank: f"{event}/{rank}" for rank in range(self._size)}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=self._timeout_s))
        except DistNetworkError as error:
            raise RanksError(_LOST) from error
        except RuntimeError as error:
            late = [rank for rank, key in keys.items() if not self._store.check([key])]
            raise RanksError(
                f"after {self._timeout_s:g} s (--dist-timeout) {self._names(late)} of {self._size} ranks "
                f"{'has' if len(late) == 1 else 'have'} {problem}; its log lines begin with its name"
            ) from error

    def _names(self, ranks: Iterable[int]) -> str:
        several = self._ranks_a_node < self._size
        return " and ".join(
            f"rank {rank}" + (f" (node {rank // self._ranks_a_node})" if several else "")
            for rank in ranks
        )
