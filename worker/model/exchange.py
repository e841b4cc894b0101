"""The exchange of rows among DP ranks, around the layers of experts.

Each DP rank has its own requests, and a part of the experts. A layer of experts takes the rows of all DP ranks. Their
results are summed, and each DP rank gets its own rows of the sum.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mla_router.worker.kernels.comm.group import Group


class Exchange(NamedTuple):
    """The rows of one step. Without other DP ranks they stay as they are. T: own rows, S: rows of all DP ranks."""

    out_cache_loc: Tensor | None = None  # [S] int64: 0 marks idle rows. None: no row is idle
    group: Group = Group.alone()
    counts: tuple[int, ...] = ()  # rows of each rank of `group`, if it has several

    @property
    def is_needed(self) -> bool:
        """Whether there are other DP ranks."""
        return self.group.size > 1

    def gather(self, rows: Tensor) -> Tensor:
        """Returns the rows [S, ...] of all ranks. `rows` [T, ...]."""
        return self.group.gather_rows(rows, self.counts)

    def scatter(self, rows: Tensor) -> Tensor:
        """Returns own rows [T, ...] of the sum of `rows` [S, ...] over the ranks. Overwrites `rows`."""
        return self.group.scatter_rows(rows, self.counts)


NO_EXCHANGE = Exchange()  # without other DP ranks and idle rows
