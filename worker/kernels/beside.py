"""Work on a second stream of the same GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from mla_router.worker.kernels.weight import Activations


class Fork:
    """A point of the current stream, after which work on rows `x` may start on a second stream of a GPU.

    The work does not wait for kernels that are launched between fork and start. An exchange with other ranks belongs
    there: it is first to get the few multiprocessors that it needs.
    """

    def __init__(self, x: Activations) -> None:
        self._x = x
        self._event = torch.cuda.current_stream().record_event() if x.is_cuda else None

    def start(self, work: Callable[[Activations], Tensor]) -> Callable[[], Tensor]:
        """Starts work(x), and returns a function that waits for it on the device and returns its result. The function must
        be called. Memory that `work` allocates is reused only by work that is launched after the wait."""
        x, event = self._x, self._event
        if event is None:
            done = work(x)
            return lambda: done
        stream = _second_stream(x.device)
        stream.wait_event(event)
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
