"""Decode attention in a CUDA graph: a replay reads the lengths and slots of its own time, not those of the capture."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from support.cuda import assert_rows_close, captured, forbid_waiting
from support.paged_cache import PagedCache


def check_captured(
    paged: PagedCache, step: Callable[[], Tensor], expected: Callable[[PagedCache], Tensor]
) -> None:
    """Captures `step`, which returns a row for each request of `paged`, while all lengths are 1. Replays the graph with all
    requests, and with three requests and padding (length 1 on page 0). Compares with `expected`, which returns the rows of
    the given requests."""
    lengths, slots = paged.lengths.clone(), paged.slots.clone()
    paged.lengths.fill_(1)
    replay, out = captured(step)
    with forbid_waiting():
        step()
    idle = paged.idle_slot()
    for used in (len(lengths), 3):
        paged.lengths.fill_(1)
        paged.slots.fill_(idle)
        paged.lengths[:used] = lengths[:used]
        paged.slots[:used] = slots[:used]
        with forbid_waiting():
            replay()
        assert_rows_close(out[:used], expected(paged.first(used)))
