"""The choice of the trees of drafts that are verified, among their candidates (`tree_growth.py`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.kv_cache.tree_rows import Trees
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.kernels.sampling.tree_growth import Candidates


def choose_nodes(candidates: Candidates, slots: Tensor, drafts: Tensor, trees: Trees) -> None:
    """Writes the trees of the best candidates of S slots, the earlier ones of equals: to the lines `slots` [S] int64 of
    `drafts` [all slots, N - 1] int64 the tokens of the nodes after the root, and to those of `trees` [all slots, N]
    the rest. The chain of best nodes, each the best child of the one before, has the first numbers; the others have the
    order of the candidates."""
    op = choose_nodes_triton if slots.is_cuda else choose_nodes_torch
    op(candidates, slots, drafts, trees)


def choose_nodes_torch(candidates: Candidates, slots: Tensor, drafts: Tensor, trees: Trees) -> None:
    (count, among), nodes = candidates.tokens.shape, drafts.shape[1] + 1
    # Of equal candidates the shallower one is first, which may be the parent of the other
    order = candidates.confidences.sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, : nodes - 1].sort(dim=1).values
    chosen = _chain_first(candidates.parents.gather(1, chosen), chosen)
    # The number of a candidate's node; number 0 is the root's
    numbers = torch.zeros(count, among + 1, dtype=torch.int64, device=slots.device)
    steps = torch.arange(nodes, device=slots.device)
    numbers.scatter_(1, chosen + 1, steps[1:].expand_as(chosen))
    parents = numbers.gather(1, candidates.parents.gather(1, chosen) + 1)
    parents = torch.cat((parents.new_zeros(count, 1), parents), dim=1)
    depths, ancestors = torch.zeros_like(parents), torch.zeros_like(parents)
    ancestors[:, 0] = 1
    for node in range(1, nodes):
        above = parents[:, node : node + 1]
        depths[:, node] = depths.gather(1, above)[:, 0] + 1
        ancestors[:, node] = ancestors.gather(1, above)[:, 0] | 1 << steps[node]
    drafts.index_copy_(0, slots, candidates.tokens.gather(1, chosen))
    for of_all, of_slots in zip(trees, (parents, depths, ancestors), strict=True):
        of_all.index_copy_(0, slots, of_slots)


def _chain_first(parents: Tensor, chosen: Tensor) -> Tensor:
    """Returns `chosen` [S, N - 1], ascending candidates with `parents` [S, N - 1], with the chain of best nodes in
    front."""
    on_chain, last = torch.zeros_like(chosen), chosen.new_full((len(chosen), 1), -1)
    for _ in range(chosen.shape[1]):
        is_child = parents == last
        first = is_child & (is_child.cumsum(dim=1) == 1)
        on_chain |= first
        # A candidate has no child with the number -2
        last = torch.where(first, chosen, -2).amax(dim=1, keepdim=True)
    order = on_chain.sort(dim=1, descending=True, stable=True).indices
    return chosen.gather(1, order)


def choose_nodes_triton(
    candidates: Candidates, slots: Tensor, drafts: Tensor, trees: Trees
) -> None:
    (count, among), nodes = candidates.tokens.shape, drafts.shape[1] + 1
    assert all(x.shape[1] == nodes and x.is_contiguous() for x in trees) and (
        drafts.is_contiguous() and all(x.is_contiguous() for x in (*candidates, slots))
    ), f"drafts {tuple(drafts.shape)}, trees {[tuple(x.shape) for x in trees]}"
    _choose_kernel[(count,)](
        *candidates,
        slots,
        drafts,
        *trees,
        CANDIDATES=among,
        WIDTH=triton.next_power_of_2(among),
        NODES=nodes,
        NODE_WIDTH=triton.next_power_of_2(nodes),
        num_warps=1 if among <= 256 else 4,
        **launch_options(),
    )


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _choose_kernel(
    tokens,
    confidences,
    candidate_parents,
    slots,
    drafts,
    parents,
    depths,
    ancestors,
    CANDIDATES: tl.constexpr,
    WIDTH: tl.constexpr,
    NODES: tl.constexpr,
    NODE_WIDTH: tl.constexpr,
):
    """A program is for a slot."""
    wait_for_previous()
    at = tl.program_id(0).to(tl.int64) * CANDIDATES
    slot = tl.load(slots + tl.program_id(0))
    candidate, place = tl.arange(0, WIDTH), tl.arange(0, NODE_WIDTH)
    exists = candidate < CANDIDATES
    confidence = tl.load(confidences + at + candidate, exists, other=float("-inf"))
    left = exists
    for _ in range(1, NODES):
        largest = tl.max(tl.where(left, confidence, float("-inf")), 0)
        best = tl.min(tl.where(left & (confidence == largest), candidate, WIDTH), 0)
        left = left & (candidate != best)
    chosen = exists & (left == 0)
    parent_of = tl.load(candidate_parents + at + candidate, exists, other=-2)
    is_behind = chosen
    number = tl.zeros([WIDTH], tl.int32)
    on_chain = 0
    last = tl.min(tl.where(chosen & (parent_of == -1), candidate, WIDTH), 0)
    while last < WIDTH:
        on_chain += 1
        number = tl.where(candidate == last, on_chain, number)
        is_behind = is_behind & (candidate != last)
        last = tl.min(tl.where(chosen & (parent_of == last), candidate, WIDTH), 0)
    number = tl.where(is_behind, on_chain + tl.cumsum(is_behind.to(tl.int32), 0), number)
    of_parent = tl.zeros([NODE_WIDTH], tl.int64)
    depth = tl.zeros([NODE_WIDTH], tl.int64)
    bits = (place == 0).to(tl.int64)
    previous = -1
    for _ in range(1, NODES):
        # A parent comes before its children
        previous = tl.min(tl.where(chosen & (candidate > previous), candidate, WIDTH), 0)
        node = tl.sum(tl.where(candidate == previous, number, 0), 0)
        tl.store(drafts + slot * (NODES - 1) + node - 1, tl.load(tokens + at + previous))
        parent = tl.load(candidate_parents + at + previous)
        above = tl.sum(tl.where(candidate == parent, number, 0), 0)  # 0 for the root
        own = tl.sum(tl.where(place == above, bits, 0), 0)
        own = own | (tl.full([], 1, tl.int64) << node)
        behind = tl.sum(tl.where(place == above, depth, 0), 0) + 1
        bits = tl.where(place == node, own, bits)
        depth = tl.where(place == node, behind, depth)
        of_parent = tl.where(place == node, above.to(tl.int64), of_parent)
    to = slot * NODES + place
    tl.store(parents + to, of_parent, place < NODES)
    tl.store(depths + to, depth, place < NODES)
    tl.store(ancestors + to, bits, place < NODES)
