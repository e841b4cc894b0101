"""The rows of sampled slots, counted one by one."""

from __future__ import annotations

import numpy as np
import pytest

from mla_router.worker.engine.sampling.rows import SampledRows
from mla_router.worker.step.plan import PrefillChunk, StepPlan

DEPTH, NODES = 3, 5  # of a tree of drafts, its root included
PLAN = StepPlan(
    (4, 2),
    (9, 9),
    (PrefillChunk(7, 0, (1, 2), is_last=True),),
    (),
    (),
    num_drafts=DEPTH - 1,
    tree_nodes=NODES,
)


@pytest.mark.parametrize("indices", [[0, 1, 2], [1, 2], [2], [0]])
def test_paths_have_one_entry_for_each_token_that_a_slot_may_get(indices: list[int]) -> None:
    paths, firsts, start = [], [], 0
    for index in indices:
        is_decode = index < len(PLAN.decode_slots)
        for step in range(DEPTH if is_decode else 1):
            paths.append(index * DEPTH + step)
            firsts.append(start)
        start += NODES if is_decode else 1
    found = SampledRows(PLAN).on_paths(np.array(indices))
    assert [rows.tolist() for rows in found] == [paths, firsts]
