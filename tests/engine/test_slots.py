"""The device-resident state of slots."""

from __future__ import annotations

import torch

from mla_router.worker.engine.slots import SlotState
from mla_router.worker.step.engine import Capacity


def test_idle_rows_are_of_token_zero() -> None:
    """A model may have fewer tokens than there are slots: the number of the idle slot is no token of it."""
    capacity = Capacity(num_pages=8, page_size=4, num_slots=2048, context_length=8)
    slots = SlotState(capacity, torch.device("cpu"))
    rows = slots.idle_rows(3)
    assert rows.slots.tolist() == [slots.idle_slot] * 3
    assert rows.lengths.tolist() == [1] * 3
    for zeros in (rows.tokens, rows.positions, rows.out_cache_loc):
        assert zeros.tolist() == [0] * 3
