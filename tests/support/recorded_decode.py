"""A step of decode attention in a CUDA graph: what it reads of lengths and slots is what they are at replay."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from support.cuda import assert_rows_close, captured, forbid_waiting
from support.paged_cache import PagedCache


def check_recorded(
    paged: PagedCache, step: Callable[[], Tensor], expected: Callable[[PagedCache], Tensor]
) -> None:
    """`step` has a result for each request of `paged`, and `expected` says what it is for those that it is
    given. It is recorded while all have length 1, and replayed with all of them, and with three and
    padding: length 1 on page 0."""
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
