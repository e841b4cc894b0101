"""The acceptance of trees of drafts against a walk from the root."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.kernels.sampling.accept_tree import accept_tree_torch, accept_tree_triton
from mla_router.worker.step.result import NO_TOKEN, UNUSED
from support.examples import examples
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

SLOTS = 9


@pytest.mark.parametrize("op", [accept_tree_torch, accept_tree_triton])
@examples(40)
@given(
    decodes=st.integers(0, 5),
    others=st.integers(0, 3),
    nodes=st.integers(2, 9),
    depth=st.integers(1, 4),
    number=st.integers(0, 999),
    limited=st.booleans(),
)
def test_as_a_walk(
    op: Callable[..., None],
    decodes: int,
    others: int,
    nodes: int,
    depth: int,
    number: int,
    limited: bool,
) -> None:
    """Few different tokens, so that many nodes are right; some rows have no token, some slots have no room, some none even
    for their last token."""
    draw = torch.Generator().manual_seed(number)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw)

    slots = torch.randperm(SLOTS, generator=draw)[: decodes + others]
    sampled = integers(NO_TOKEN, 3, decodes * nodes + others).int()
    lengths = integers(1, 50, SLOTS).int()
    drafted, parents = integers(0, 3, SLOTS, nodes - 1), torch.zeros(SLOTS, nodes).long()
    for slot in range(SLOTS):
        grow(drafted[slot], parents[slot], depth, integers)
    last_token = torch.full((SLOTS,), 99)
    bounds = lengths[slots[:decodes]].long() + integers(-1, depth + 2, decodes)
    limits = integers(1, nodes + 1, decodes) if limited else torch.full((decodes,), nodes)
    out = torch.full((len(slots), depth + 1), 7, dtype=torch.int32, device=DEVICE)
    last_rows = torch.empty(len(slots), dtype=torch.int64, device=DEVICE)
    path = torch.full((len(slots), depth + 1), 7, device=DEVICE)
    state = lengths.clone().to(DEVICE), last_token.clone().to(DEVICE)
    trees = drafted.to(DEVICE), parents.to(DEVICE)
    op(
        sampled.to(DEVICE),
        slots.to(DEVICE),
        bounds.to(DEVICE),
        *trees,
        *state,
        out,
        last_rows,
        path,
        limits.int().to(DEVICE) if limited else None,
    )

    for at, slot in enumerate(slots.tolist()):
        first = at * nodes if at < decodes else decodes * nodes + at - decodes
        length, walked = int(lengths[slot]), [0]
        if at < decodes:
            tokens = sampled[first : first + int(limits[at])].tolist()
            room = int(bounds[at]) - length
            walked = walk(tokens, drafted[slot].tolist(), parents[slot].tolist(), room)
        gained = [int(sampled[first + node]) for node in walked]
        spare = [UNUSED] * (depth + 1 - len(walked))
        assert out[at].tolist() == gained + spare
        if at < decodes and bounds[at] < length:
            walked[0] = UNUSED
        assert path[at].tolist() == walked + spare
        assert last_rows[at] == first + max(0, walked[-1])
        assert state[0][slot] == length + len(gained)
        assert state[1][slot] == max(0, gained[-1])
    untouched = [slot for slot in range(SLOTS) if slot not in slots.tolist()]
    assert torch.equal(state[0].cpu()[untouched], lengths[untouched])
    assert torch.equal(state[1].cpu()[untouched], last_token[untouched])


def grow(
    drafted: torch.Tensor, parents: torch.Tensor, depth: int, integers: Callable[..., torch.Tensor]
) -> None:
    """Draws the parent of each node but the root, and changes drafts until those of one parent differ."""
    depths, children = [0], set[tuple[int, int]]()
    for node in range(1, len(parents)):
        allowed = [parent for parent in range(node) if depths[parent] < depth]
        parent = allowed[int(integers(0, len(allowed), 1))]
        while (parent, int(drafted[node - 1])) in children:
            drafted[node - 1] += 1
        children.add((parent, int(drafted[node - 1])))
        parents[node] = parent
        depths.append(depths[parent] + 1)


def walk(sampled: list[int], drafted: list[int], parents: list[int], room: int) -> list[int]:
    """Returns the accepted nodes from the root on: each is the child that has the token sampled at its parent."""
    walked = [0]
    while len(walked) <= room:
        found = [
            node
            for node in range(1, len(sampled))
            if parents[node] == walked[-1] and drafted[node - 1] == sampled[walked[-1]]
        ]
        if not found:
            break
        walked += found
    return walked


def launches() -> None:
    with torch.device("meta"):
        numbers = torch.empty(33 * 8, dtype=torch.int64)
        out = torch.empty(33, 4, dtype=torch.int32)
        by_slot = numbers[:33], numbers[:33]
        trees = torch.empty(1024, 7, dtype=torch.int64), torch.empty(1024, 8, dtype=torch.int64)
        state = torch.empty(1024, dtype=torch.int32), torch.empty(1024, dtype=torch.int64)
        accept_tree_triton(numbers.int(), *by_slot, *trees, *state, out, numbers[:33], out.long())


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
