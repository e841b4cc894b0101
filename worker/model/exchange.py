"""The exchange of rows among DP ranks, around the layers of experts.

Each DP rank has its own requests, and a part of the experts. A layer of experts takes the rows of all DP ranks. Their
results are summed, and each DP rank gets its own rows of the sum. Either all rows are gathered on all ranks, or each row is
sent to the ranks that have its experts, which its own rank has chosen.

Rows that all products of the layer take quantized are sent quantized, which is half the bytes, as DeepSeek-V3 sends them
(arXiv:2412.19437, section 3.3.2). Then each rank computes the gate's logits of its own rows, and sends them as well.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from mla_router.worker.kernels.comm.all_to_all import Choice, Dispatched, ExpertTables
from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.weight import Activations, Quantized, RowForm


class Way(Enum):
    """The way of rows to their experts. The same on all ranks."""

    GATHER = auto()  # all rows to all ranks
    GATHER_QUANTIZED = auto()  # the same, with the gate's logits
    DISPATCH = auto()  # each row to the ranks of its experts alone


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

    def dispatches(self, rows: Tensor, top_k: int) -> bool:
        """Whether rows can be sent to the ranks of their experts, `top_k` each. `rows` [T, N]. The same on all ranks."""
        return self.group.dispatches(rows.shape[1], rows.dtype, top_k, self.counts)

    def dispatch(self, rows: Activations, choice: Choice, experts: ExpertTables) -> Dispatched:
        """Sends rows [T, N] to the ranks of their experts. Returns the rows [S, N] of all ranks, as far as they are
        here."""
        return self.group.dispatch(rows, choice, experts, self.counts)

    def combine(self, results: Tensor, sent: Dispatched) -> Tensor:
        """Returns the sums [T, N] of own rows. results [S, N]: of the rows of `sent`."""
        return self.group.combine(results, sent, self.counts)

    @property
    def own_cache_loc(self) -> Tensor | None:
        """`out_cache_loc` of own rows [T]."""
        loc = self.out_cache_loc
        if loc is None or not self.is_needed:
            return loc
        return loc[self.first : self.first + self.counts[self.group.rank]]

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
