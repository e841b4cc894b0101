"""A grammar worker that ends: its requests end in any state, and no other requests do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.messages import Abort
from mla_router.worker.scheduler.grammars import _mask_end
from mla_router.worker.step.engine import Capacity
from support.fake_engine import continuation
from support.forcing_grammars import FORCING, ForcingGrammars
from support.scripted_scheduler import assert_nothing_is_allocated, generate, run

PROMPT = [1, 2, 3]


class LostAfter(ForcingGrammars):
    """A grammar pool whose worker ends in a `fill`, after a number of successful ones."""

    def __init__(self, fills: int) -> None:
        super().__init__()
        self.fills = fills

    def fill(self, *rows: Any) -> Any:
        self.is_lost = self.fills == 0
        self.fills -= 1
        return super().fill(*rows)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk_size", [64, 2])
def test_all_requests_of_a_lost_process_end_and_no_others(overlap: bool, chunk_size: int) -> None:
    grammars: Any = LostAfter(7)
    script: dict[int, list[Any]] = {
        0: [generate("runs", PROMPT, 100, grammar=FORCING), generate("free", [4, 5], 40)],
        4: [generate("prefills", list(range(30)), 40, grammar=FORCING)],
        5: [generate("waits", PROMPT, 40, grammar=FORCING)],
    }
    capacity = Capacity(num_pages=64, page_size=4, num_slots=3, context_length=128)
    outcome = run(
        script, overlap=overlap, chunk_size=chunk_size, capacity=capacity, grammars=grammars
    )
    assert_nothing_is_allocated(outcome)
    for rid in ("runs", "prefills", "waits"):
        assert outcome.channel.reason(rid) == "lost"
    assert outcome.channel.reason("free") == "length"
    assert outcome.channel.tokens("free") == continuation([4, 5], 40)


def test_a_request_aborted_when_its_process_is_lost_ends_once() -> None:
    grammars: Any = LostAfter(2)
    script: dict[int, list[Any]] = {
        0: [generate(rid, PROMPT, 40, grammar=FORCING) for rid in ("a", "b")],
        **{turn: [Abort("b")] for turn in range(1, 9)},
    }
    capacity = Capacity(num_pages=64, page_size=4, num_slots=1, context_length=128)
    outcome = run(script, capacity=capacity, grammars=grammars)
    assert_nothing_is_allocated(outcome)
    assert outcome.channel.reason("a") == "lost"
    assert outcome.channel.reason("b") == "abort"


@given(allowed=st.sets(st.integers(0, 63)), ends=st.sets(st.integers(0, 63)))
def test_end_tokens_lose_their_bits_unless_no_other_token_is_allowed(
    allowed: set[int], ends: set[int]
) -> None:
    bits = [sum(1 << token % 32 for token in allowed if token // 32 == word) for word in (0, 1)]
    mask = np.array(bits, dtype=np.uint32).view(np.int32)
    _mask_end(mask, ends)
    left = {t for t in range(64) if int(mask.view(np.uint32)[t // 32]) >> t % 32 & 1}
    assert left == (allowed - ends or allowed)
