"""The inputs of nodes of trees against a loop over rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp
from mla_router.worker.kernels.kv_cache.tree_rows import (
    Trees,
    look_up_nodes_torch,
    look_up_nodes_triton,
)
from mla_router.worker.step.plan import RowKind
from support.sm90 import compile_sm90
from support.triton_device import DEVICE


@pytest.mark.parametrize("op", [look_up_nodes_torch, look_up_nodes_triton])
def test_as_a_loop(op: Callable[..., None]) -> None:
    """Two slots with trees, one of which has room for one draft, and one that is at its end; then rows of other kinds."""
    nodes, first_row = 4, 500
    parents, depths = [0, 0, 0, 1], [0, 1, 1, 2]
    ancestors = [0b1, 0b11, 0b101, 0b1011]

    def of_slots(numbers: list[int]) -> torch.Tensor:
        return torch.tensor([numbers] * 5, device=DEVICE)

    trees = Trees(of_slots(parents), of_slots(depths), of_slots(ancestors))
    lengths = torch.tensor([9, 20, 30, 1, 1], dtype=torch.int32, device=DEVICE)
    last_token = torch.arange(50, 55, device=DEVICE)
    drafts = 100 + torch.arange(15, device=DEVICE).view(5, 3)
    bounds = {2: 40, 0: 10, 1: 19}
    slots = [slot for slot in bounds for _ in range(nodes)] + [3, 4]
    rows = torch.tensor(
        [
            slots,
            [bounds.get(slot, 6) for slot in slots],
            [*range(nodes)] * 3 + [77, 0],
        ],
        device=DEVICE,
    )
    kinds = torch.tensor(
        [RowKind.NODE] * 12 + [RowKind.EXTEND, RowKind.IDLE], dtype=torch.int8, device=DEVICE
    )
    found = LookedUp(
        *(
            torch.full((14,), 7, dtype=torch.int32 if name == "lengths" else torch.int64).to(DEVICE)
            for name in LookedUp._fields
        )
    )
    visible = torch.full((20,), 7, device=DEVICE)
    op(rows, kinds, trees, last_token, drafts, lengths, first_row, visible, found)
    for row, slot in enumerate(slots[:12]):
        node, known, bound = row % nodes, int(lengths[slot]), bounds[slot]
        idle = known + depths[node] > bound
        assert found.slots[row] == slot
        assert found.lengths[row] == min(known, bound) - 1
        assert found.tokens[row] == (last_token[slot] if node == 0 else drafts[slot, node - 1])
        assert found.positions[row] == (0 if idle else known - 1 + depths[node])
        assert found.out_cache_loc[row] == (0 if idle else first_row + row)
        assert visible[row] == (0 if idle else ancestors[node])
    for tensor in found:
        assert tensor[12:].tolist() == [7, 7]
    assert visible[12:].tolist() == [0, 0] + [7] * 6


def launches() -> None:
    with torch.device("meta"):
        trees = Trees(*torch.empty(3, 64, 8, dtype=torch.int64))
        of_slots = torch.empty(64, dtype=torch.int64)
        numbers = torch.empty(256, dtype=torch.int64)
        found = LookedUp(numbers, numbers.int(), numbers, numbers, numbers)
        kinds, drafts = numbers.to(torch.int8), torch.empty(64, 7, dtype=torch.int64)
        rows = torch.empty(3, 256, dtype=torch.int64)
        state = of_slots, drafts, of_slots.int()
        look_up_nodes_triton(rows, kinds, trees, *state, 6400, numbers, found)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
