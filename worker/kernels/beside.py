"""Work on a second stream of the same GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from mla_router.worker.kernels.weight import Activations

# More rows fill the GPU by themselves.
MAX_ROWS = 256


def beside(x: Activations, work: Callable[[Activations], Tensor]) -> Callable[[], Tensor]:
    """Starts work(x), for x [T, ...], and returns a function that waits for it on the device and returns its result.
    The function must be called.

    Few rows on a GPU run on a second stream. Memory that `work` allocates is reused only by work that is launched
    after the wait.
    """
    if not x.is_cuda or x.shape[0] > MAX_ROWS:
        done = work(x)
        return lambda: done
    stream = _second_stream(x.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = work(x)

    def joined(_read: Activations = x) -> Tensor:
        """Keeps a reference to `x`: its memory must not be reused while the second stream reads it."""
        torch.cuda.current_stream().wait_stream(stream)
        return result

    return joined


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the same stream each time: libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
