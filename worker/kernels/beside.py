"""Work that runs beside what is launched after it, on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

# With more rows a piece of work fills the GPU by itself.
MAX_ROWS = 256


def beside(x: Tensor, work: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    """work(x), x [T, ...], begun now. The function returned must be called: it waits, on the device, and
    returns the result.

    Few rows on a GPU: on a stream of its own. Whatever `work` allocates is used again only by work
    that was launched after it had been waited for.
    """
    if not x.is_cuda or x.shape[0] > MAX_ROWS:
        done = work(x)
        return lambda: done
    stream = _second_stream(x.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = work(x)

    def joined(_read: Tensor = x) -> Tensor:
        """Holds `x` as well: its memory may not be given to others while the second stream reads it."""
        torch.cuda.current_stream().wait_stream(stream)
        return result

    return joined


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: libraries keep workspaces for each stream that they have seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
