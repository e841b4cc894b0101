"""The profile run, before the KV cache is sized, has steps as large as any later step."""

from __future__ import annotations

import pytest

from mla_router.worker.engine.profile_run import profile_plans
from mla_router.worker.step.engine import Capacity


@pytest.mark.parametrize(
    ("context_length", "prefill_tokens", "slots"),
    [
        (163840, 8192, 1024),
        (8192, 8192, 1024),
        (4096, 8192, 64),
        (2048, 16384, 1024),
        (512, 8192, 4),
    ],
)
def test_the_largest_step_has_all_prompt_tokens_and_all_slots(
    context_length: int, prefill_tokens: int, slots: int
) -> None:
    capacity = Capacity(slots, 16, slots, context_length)
    plans = profile_plans(capacity, prefill_tokens, 1 << 17)
    for plan in plans:
        used = [*plan.decode_slots, *(chunk.slot for chunk in plan.chunks)]
        assert len(set(used)) == len(used) and max(used) < slots
        assert all(c.start + len(c.tokens) <= context_length for c in plan.chunks)
    most = min(prefill_tokens, slots * context_length)  # the limit of one step
    largest = max(plans, key=lambda plan: sum(len(chunk.tokens) for chunk in plan.chunks))
    tokens = sum(len(chunk.tokens) for chunk in largest.chunks)
    assert most - len(largest.chunks) < tokens <= most
    assert len(largest.decode_slots) + len(largest.chunks) == slots
