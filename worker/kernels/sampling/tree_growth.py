"""The growth of dynamic trees of drafts (EAGLE-2, arXiv:2406.16858, section 4).

The confidence of a node is the share that the drafter gives to its token, times the confidence of its parent. In each
depth the nodes of the largest confidence are expanded. At last the tree has the nodes of the largest confidence of all
depths. A node comes after its parent in this order, since it has no larger confidence, so the nodes are a tree.

Each depth is one kernel on a GPU, and so is the choice of the tree (`tree_choice.py`). All shapes are fixed, so that a
CUDA graph can have them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.tree_shape import TreeShape


class Candidates(NamedTuple):
    """The nodes of S trees, C of each (`TreeShape.candidates`). The children of a node are next to each other, and
    shallower nodes come first."""

    tokens: Tensor  # [S, C] int64
    confidences: Tensor  # [S, C] float32, logarithms
    parents: Tensor  # [S, C] int64, numbers of candidates, and -1 for the root

    @classmethod
    def empty(cls, slots: int, shape: TreeShape, device: torch.device) -> Candidates:
        def new(dtype: torch.dtype) -> Tensor:
            return torch.empty(slots, shape.candidates, dtype=dtype, device=device)

        return cls(new(torch.int64), new(torch.float32), new(torch.int64))


class Beam(NamedTuple):
    """The nodes of a depth that are expanded, K of each of S slots, next to each other."""

    rows: LookedUp  # [S * K], the rows of a step; the location of an idle one is 0
    visible: Tensor  # [S * K] int64, as in `TreeTail`: bit i: node i of those that are expanded is the node or its ancestor
    confidences: Tensor  # [S * K] float32, logarithms
    candidates: Tensor  # [S * K] int64, their numbers among the candidates of the slot
    parents: Tensor  # [S * K] int64, the rows of their parents among those of the depth before

    @classmethod
    def empty(cls, size: int, device: torch.device) -> Beam:
        def new(dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        rows = LookedUp(new(), new(torch.int32), new(), new(), new())
        return cls(rows, new(), new(torch.float32), new(), new())


class Roots(NamedTuple):
    """The last tokens of S slots, from which trees of `shape` grow. Slots after `shape.slots` are idle."""

    slots: Tensor  # [S] int64
    bounds: Tensor  # [S] int64: upper bounds of the tokens in the KV cache of the drafter
    lengths: Tensor  # [all slots] int32: tokens of a slot, the root included
    first_row: int  # of the cache rows of expanded nodes, `shape.expanded` of each slot
    shape: TreeShape


def grow_tree(
    candidates: Candidates,
    beam: Beam | None,
    tokens: Tensor,
    shares: Tensor,
    depth: int,
    roots: Roots,
) -> Beam:
    """Adds the children of the nodes of `beam`, None for those of the roots, to `candidates`: `tokens` [S * K, K]
    int64, or [S, K], and the logarithms of their `shares`, float32. NaN is the share 0. Returns the best of them, the
    earlier one of equals, which are to be expanded in `depth`, 1 for the children of the roots; after the last depth
    nobody needs them.

    The layer has the tokens before the last one, and the row of a node has the position of the token before it."""
    op = grow_tree_triton if tokens.is_cuda else grow_tree_torch
    return op(candidates, beam, tokens, shares, depth, roots)


def grow_tree_torch(
    candidates: Candidates,
    beam: Beam | None,
    tokens: Tensor,
    shares: Tensor,
    depth: int,
    roots: Roots,
) -> Beam:
    width, count = roots.shape.topk, len(roots.slots)
    shares = shares.nan_to_num(nan=float("-inf"), neginf=float("-inf")).clamp_max(0)
    parents, visible = torch.full_like(tokens, -1), torch.zeros_like(tokens)
    if beam is not None:
        shares = beam.confidences[:, None] + shares
        parents = beam.candidates[:, None].expand_as(tokens)
        visible = beam.visible[:, None].expand_as(tokens)
    first = 0 if beam is None else width + (depth - 2) * width**2
    confidences = shares.reshape(count, -1)
    added = slice(first, first + confidences.shape[1])
    candidates.confidences[:, added] = confidences
    candidates.tokens[:, added] = tokens.view(count, -1)
    candidates.parents[:, added] = parents.reshape(count, -1)

    order = confidences.sort(dim=1, descending=True, stable=True).indices
    best = order[:, :width]
    numbers = torch.arange(count, device=tokens.device)[:, None]
    steps = torch.arange(width, device=tokens.device)
    before = roots.lengths[roots.slots].long()[:, None] - 1
    is_idle = (before + depth > roots.bounds[:, None]) | (numbers >= roots.shape.slots)
    own = (depth - 1) * width + steps
    visible = visible.reshape(count, -1).gather(1, best) | 1 << own
    locations = roots.first_row + numbers * roots.shape.expanded + own
    rows = LookedUp(
        roots.slots.repeat_interleave(width),
        before.clamp_min(1).to(torch.int32).flatten().repeat_interleave(width),
        tokens.view(count, -1).gather(1, best).flatten(),
        torch.where(is_idle, 0, before + depth - 1).flatten().repeat_interleave(width),
        torch.where(is_idle, 0, locations).flatten(),
    )
    return Beam(
        rows,
        torch.where(is_idle, 0, visible).flatten(),
        confidences.gather(1, best).flatten(),
        (first + best).flatten(),
        (numbers * (len(tokens) // count) + best // width).flatten(),
    )


def grow_tree_triton(
    candidates: Candidates,
    beam: Beam | None,
    tokens: Tensor,
    shares: Tensor,
    depth: int,
    roots: Roots,
) -> Beam:
    shape, count = roots.shape, len(roots.slots)
    width = shape.topk
    assert tokens.shape == shares.shape == (count * (1 if beam is None else width), width), (
        f"tokens {tuple(tokens.shape)}, shares {tuple(shares.shape)}, {count} slots, {shape}"
    )
    read = (*candidates, tokens, shares, roots.slots, roots.bounds, roots.lengths)
    assert all(x.is_contiguous() for x in read), f"strides {[x.stride() for x in read]}"
    grown = Beam.empty(count * width, tokens.device)
    _grow_kernel[(count,)](
        tokens,
        shares,
        None if beam is None else beam.visible,
        None if beam is None else beam.confidences,
        None if beam is None else beam.candidates,
        roots.slots,
        roots.bounds,
        roots.lengths,
        *candidates,
        *grown.rows,
        *grown[1:],
        depth,
        roots.first_row,
        shape.slots,
        K=width,
        WIDTH=triton.next_power_of_2(width),
        CANDIDATES=shape.candidates,
        EXPANDED=shape.expanded,
        num_warps=1,
        **launch_options(),
    )
    return grown


@triton.jit(
    do_not_specialize=["depth", "first_row", "most_slots"],
    do_not_specialize_on_alignment=["slots", "bounds"],
)
def _grow_kernel(
    tokens,
    shares,
    beam_visible,
    beam_confidences,
    beam_candidates,
    slots,
    bounds,
    lengths,
    all_tokens,
    all_confidences,
    all_parents,
    row_slots,
    row_lengths,
    row_tokens,
    row_positions,
    row_locations,
    visible,
    confidences,
    candidates,
    parents,
    depth,
    first_row,
    most_slots,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    CANDIDATES: tl.constexpr,
    EXPANDED: tl.constexpr,
):
    """A program is for a slot. The roots have no beam."""
    wait_for_previous()
    NODES: tl.constexpr = 1 if beam_visible is None else K
    at = tl.program_id(0).to(tl.int64)
    node, child = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    exists = (node < NODES) & (child < K)
    place = node * K + child
    token = tl.load(tokens + at * NODES * K + place, exists, other=0)
    share = tl.load(shares + at * NODES * K + place, exists, other=float("-inf"))
    share = tl.where(share <= 0, share, tl.where(share > 0, 0.0, float("-inf")))
    first = 0
    parent = tl.full([WIDTH, 1], -1, tl.int64)
    seen = tl.zeros([WIDTH, 1], tl.int64)
    if beam_visible is not None:
        first = K + (depth - 2) * K * K
        share += tl.load(beam_confidences + at * K + node, node < K, other=0.0)
        parent = tl.load(beam_candidates + at * K + node, node < K, other=0)
        seen = tl.load(beam_visible + at * K + node, node < K, other=0)
    added = at * CANDIDATES + first + place
    tl.store(all_tokens + added, token, exists)
    tl.store(all_confidences + added, share, exists)
    tl.store(all_parents + added, tl.broadcast_to(parent, [WIDTH, WIDTH]), exists)

    slot = tl.load(slots + at)
    before = tl.load(lengths + slot).to(tl.int64) - 1
    is_idle = (before + depth > tl.load(bounds + at)) | (at >= most_slots)
    left = exists
    for rank in range(K):
        largest = tl.max(tl.max(tl.where(left, share, float("-inf")), 1), 0)
        is_largest = left & (share == largest)
        best = tl.min(tl.min(tl.where(is_largest, place, WIDTH * WIDTH), 1), 0)
        is_best = place == best
        left = left & (place != best)
        own = (depth - 1) * K + rank
        bits = tl.sum(tl.sum(tl.where(is_best & exists, seen, 0), 1), 0)
        bits = bits | (tl.full([], 1, tl.int64) << own)
        to = at * K + rank
        tl.store(row_slots + to, slot)
        tl.store(row_lengths + to, tl.maximum(before, 1).to(tl.int32))
        tl.store(row_tokens + to, tl.sum(tl.sum(tl.where(is_best & exists, token, 0), 1), 0))
        tl.store(row_positions + to, tl.where(is_idle, 0, before + depth - 1))
        tl.store(row_locations + to, tl.where(is_idle, 0, first_row + at * EXPANDED + own))
        tl.store(visible + to, tl.where(is_idle, 0, bits))
        tl.store(confidences + to, largest)
        tl.store(candidates + to, (first + best).to(tl.int64))
        tl.store(parents + to, at * NODES + best // K)
