"""What a recording reads of a step with fewer rows than it has."""

from __future__ import annotations

import torch

from mla_router.worker.engine.padded_rows import PaddedRows

IDLE = 9


def test_rows_too_many_are_the_idle_slots() -> None:
    rows = PaddedRows(5, IDLE, torch.device("cpu"))
    tokens, slots, positions = rows.read()
    assert slots.tolist() == [IDLE] * 5 and positions.tolist() == [0] * 5
    for used in (5, 2, 0, 4):  # seen through the same tensors, whatever the step before left behind
        new = torch.arange(used)
        rows.write(torch.stack([new + 30, torch.full((used,), 3), new + 70]))
        spare = 5 - used
        assert tokens[:used].tolist() == list(range(30, 30 + used))
        assert slots.tolist() == [3] * used + [IDLE] * spare
        assert positions.tolist() == [*range(70, 70 + used)] + [0] * spare
