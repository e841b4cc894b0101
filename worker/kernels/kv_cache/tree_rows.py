"""The inputs of rows that are nodes of trees of drafts, beside those of other rows (`out_cache_loc.py`).

The keys and values of a node lie behind the pages of all requests, those of the nodes of a step next to each other. So a
tree takes no pages, and a rejected node leaves nothing behind. Accepted nodes are moved to their slot's pages
(`move_rows.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mla_router.worker.core import RowKind
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp


class Trees(NamedTuple):
    """The tree of each slot, [slots, N] int64. Node 0 is the root, which is the slot's last token. Parents come before
    their children."""

    parents: Tensor  # 0 for the root
    depths: Tensor  # of the root 0
    ancestors: Tensor  # bit i: node i is the node itself or an ancestor of it


def look_up_nodes(
    rows: Tensor,
    kinds: Tensor,
    trees: Trees,
    last_token: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    first_row: int,
    visible: Tensor,
    into: LookedUp,
) -> None:
    """Writes the inputs of those of the first rows that are nodes to `into`. `rows` [3, B] int64: their slots, bounds, and
    numbers of nodes; `kinds` [B] int8; `last_token` [slots] int64, `lengths` [slots] int32, as of `look_up`; `drafts`
    [slots, N - 1] int64: the tokens of the nodes behind the root.

    A node has its position by its depth, but as its length that of the tokens in front of the root, to which it attends
    beside its ancestors. Row i of the step has the location `first_row` + i. A node whose position is beyond the bound is
    idle: it has position and location 0. Writes the nodes to which a row attends to `visible` [at least B] int64, as the
    bits of `Trees.ancestors`; 0 for idle rows, and for rows that are no nodes.
    """
    look_up_nodes_torch(rows, kinds, trees, last_token, drafts, lengths, first_row, visible, into)


def look_up_nodes_torch(
    rows: Tensor,
    kinds: Tensor,
    trees: Trees,
    last_token: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    first_row: int,
    visible: Tensor,
    into: LookedUp,
) -> None:
    slots, bounds, numbers = rows.unbind()
    is_node = kinds == RowKind.NODE
    numbers = torch.where(is_node, numbers, 0)
    depths = trees.depths[slots, numbers]
    known = lengths[slots].long()
    is_idle = known + depths > bounds
    token = torch.where(numbers == 0, last_token[slots], drafts[slots, (numbers - 1).clamp_min(0)])
    at = first_row + torch.arange(rows.shape[1], device=rows.device)
    found = LookedUp(
        slots,
        (torch.minimum(known, bounds) - 1).clamp_min(1).to(torch.int32),
        token,
        torch.where(is_idle, 0, known - 1 + depths),
        torch.where(is_idle, 0, at),
    )
    for there, here in zip(into, found, strict=True):
        there.copy_(torch.where(is_node, here, there))
    seen = torch.where(is_node & ~is_idle, trees.ancestors[slots, numbers], 0)
    visible[: rows.shape[1]].copy_(seen)
