"""The inputs of rows that are nodes of trees of drafts, beside those of other rows (`out_cache_loc.py`).

The keys and values of a node lie after the pages of all requests, those of the nodes of a step next to each other. So a
tree takes no pages, and a rejected node leaves nothing behind. Accepted nodes are moved to their slot's pages
(`move_rows.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.step.plan import RowKind

_BLOCK = 128


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
    """Writes the inputs of the nodes among the first rows to `into`. `rows` [3, B] int64: their slots, bounds,
    and numbers of nodes; `kinds` [B] int8; `last_token` [slots] int64, `lengths` [slots] int32: see `look_up`;
    `drafts` [slots, N - 1] int64: the tokens of the nodes after the root.

    The depth of a node gives its position. Its length counts the tokens before the root only: it attends to these,
    and to its ancestors. Row i of the step has the location `first_row` + i. A node whose position is beyond the bound
    is idle: it has position and location 0. Writes the nodes to which a row attends to `visible` [at least B] int64, as
    the bits of `Trees.ancestors`; 0 for idle rows, and for rows that are no nodes.
    """
    op = look_up_nodes_triton if rows.is_cuda else look_up_nodes_torch
    op(rows, kinds, trees, last_token, drafts, lengths, first_row, visible, into)


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


def look_up_nodes_triton(
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
    count, nodes = rows.shape[1], drafts.shape[1] + 1
    flat = kinds, last_token, lengths, visible, *into
    assert rows.stride(1) == 1 and all(x.stride() == (1,) for x in flat), (
        f"rows {rows.stride()}, {[x.stride() for x in flat]}"
    )
    assert all(x.shape[1] == nodes and x.is_contiguous() for x in trees) and (
        drafts.is_contiguous()
    ), f"drafts {tuple(drafts.shape)}, trees {[tuple(x.shape) for x in trees]}"
    _look_up_nodes_kernel[(triton.cdiv(count, _BLOCK),)](
        rows,
        kinds,
        trees.depths,
        trees.ancestors,
        last_token,
        drafts,
        lengths,
        *into,
        visible,
        count,
        rows.stride(0),
        first_row,
        NODES=nodes,
        BLOCK=_BLOCK,
        **launch_options(),
    )


_NODE = tl.constexpr(int(RowKind.NODE))


@triton.jit(
    do_not_specialize=["count", "row_stride", "first_row"],
    do_not_specialize_on_alignment=["rows", "kinds", "slot_lengths"],
)
def _look_up_nodes_kernel(
    rows,
    kinds,
    depths,
    ancestors,
    last_token,
    drafts,
    slot_lengths,
    slots,
    lengths,
    tokens,
    positions,
    out_cache_loc,
    visible,
    count,
    row_stride,
    first_row,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_previous()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    is_node = tl.load(kinds + row, inside, other=-1) == _NODE
    slot = tl.load(rows + row, is_node, other=0)
    bound = tl.load(rows + row_stride + row, is_node, other=0)
    node = tl.load(rows + 2 * row_stride + row, is_node, other=0)
    depth = tl.load(depths + slot * NODES + node, is_node, other=0)
    known = tl.load(slot_lengths + slot, is_node, other=1).to(tl.int64)
    last = tl.load(last_token + slot, is_node & (node == 0), other=0)
    draft = tl.load(drafts + slot * (NODES - 1) + node - 1, is_node & (node > 0), other=0)
    is_idle = known + depth > bound
    seen = tl.load(ancestors + slot * NODES + node, is_node & (is_idle == 0), other=0)
    length = tl.maximum(tl.minimum(known, bound) - 1, 1)
    tl.store(slots + row, slot, is_node)
    tl.store(lengths + row, length.to(tl.int32), is_node)
    tl.store(tokens + row, tl.where(node == 0, last, draft), is_node)
    tl.store(positions + row, tl.where(is_idle, 0, known - 1 + depth), is_node)
    tl.store(out_cache_loc + row, tl.where(is_idle, 0, first_row + row).to(tl.int64), is_node)
    tl.store(visible + row, seen, inside)
