"""The exchange of rows among DP ranks, around the layers of experts.

Each DP rank has its own requests, and a part of the experts. A layer of experts takes the rows of all DP ranks. Their
results are summed, and each DP rank gets its own rows of the sum.

Rows that all products of the layer take quantized are sent quantized, which is half the bytes, as DeepSeek-V3 sends them
(arXiv:2412.19437, section 3.3.2). Then each rank computes the gate's logits of its own rows, and sends them beside.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.weight import Quantized, RowForm


class Exchange(NamedTuple):
    """The rows of one step. Without other DP ranks they stay as they are. T: own rows, S: rows of all DP ranks."""

    out_cache_loc: Tensor | None = None  # [S] int64: 0 marks idle rows. None: no row is idle
    group: Group = Group.alone()
    counts: tuple[int, ...] = ()  # rows of each rank of `group`, if it has several

    @property
    def is_needed(self) -> bool:
        """Whether there are other DP ranks."""
        return self.group.size > 1

    @property
    def first(self) -> int:
        """The first of own rows among those of all ranks."""
        return sum(self.counts[: self.group.rank])

    def gather(self, rows: Tensor) -> Tensor:
        """Returns the rows [S, ...] of all ranks. `rows` [T, ...]."""
        return self.group.gather_rows(rows, self.counts)

    def scatter(self, rows: Tensor) -> Tensor:
        """Returns own rows [T, ...] of the sum of `rows` [S, ...] over the ranks. Overwrites `rows`."""
        return self.group.scatter_rows(rows, self.counts)

    # ---- Fast path ----

    def sends_quantized(self, rows: Tensor, form: RowForm) -> bool:
        """Whether rows are sent quantized that the products take in `form`. `rows` [T, N]. The same on all ranks.

        Our own kernels for few rows send no single bytes."""
        quantized = form.quantized is not None and not form.plain
        return quantized and not self.group.gathers_few(rows, self.counts)

    def gather_quantized(self, rows: Quantized, logits: Tensor) -> tuple[Quantized, Tensor]:
        """Returns rows [S, N] and the gate's logits [S, E] of all ranks. `rows` [T, N], `logits` [T, E]."""
        values, scales, logits = self.group.gather_together(
            (rows.values.view(torch.uint8), rows.scales.contiguous(), logits), self.counts
        )
        return Quantized(values.view(rows.values.dtype), scales, rows.group, rows.dtype), logits


NO_EXCHANGE = Exchange()  # without other DP ranks and idle rows
