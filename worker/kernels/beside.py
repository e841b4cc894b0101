"""Two independent pieces of work at the same time on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

# With more rows each piece fills the GPU by itself.
MAX_ROWS = 256


def side_by_side(
    x: Tensor, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """first(x) and second(x), x [T, ...].

    Few rows on a GPU: `second` runs on a stream of its own, beside `first`. Whatever it allocates is
    used again only by work that was launched after both had been waited for.
    """
    if not x.is_cuda or x.shape[0] > MAX_ROWS:
        return first(x), second(x)
    here, beside = torch.cuda.current_stream(), _stream_beside(x.device)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        other = second(x)
    one = first(x)
    here.wait_stream(beside)
    return one, other


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """One for all: libraries keep workspaces for each stream that they have seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
