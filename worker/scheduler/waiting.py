"""The requests that wait for a place, and who of them is next.

Order: higher priority first; within one, those that ran before and were retracted; then either
arrival (fcfs), or the longest cached prefix (lpm): what is cached now may be evicted later.

Nobody starves under lpm. A request that has been overtaken `PATIENCE` times goes before all that have
not, and in one step it can be overtaken by the rest of the window at most. So of the requests that
arrive after it with its priority, fewer than PATIENCE + WINDOW are admitted before it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from itertools import islice

from mla_router.worker.scheduler.request import Request

# Requests that are looked at in one step; those behind them keep their places.
WINDOW = 64
PATIENCE = 64


class WaitingQueue:
    """Requests in order of arrival, a deque for each priority."""

    def __init__(self, *, longest_prefix_first: bool) -> None:
        self._longest_prefix_first = longest_prefix_first
        self._levels: dict[int, deque[Request]] = {}
        self._length = 0
        self.num_arrivals = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        for priority in sorted(self._levels, reverse=True):
            yield from self._levels[priority]

    def add(self, request: Request) -> None:
        self._levels.setdefault(request.priority, deque()).append(request)
        self._length += 1
        self.num_arrivals += 1

    def put_back(self, request: Request) -> None:
        """Put a request that was retracted before all of its priority that never ran."""
        level = self._levels.setdefault(request.priority, deque())
        at = 0
        for other in level:
            if not other.was_retracted or other.arrival > request.arrival:
                break
            at += 1
        level.insert(at, request)
        self._length += 1
        self.num_arrivals += 1

    def remove(self, request: Request) -> None:
        level = self._levels[request.priority]
        level.remove(request)
        self._length -= 1
        if not level:
            del self._levels[request.priority]

    def candidates(self, cached_tokens: Callable[[Request], int]) -> list[Request]:
        """The first `WINDOW` requests, best first."""
        window = list(islice(self, WINDOW))
        if not self._longest_prefix_first or len(window) == 1:
            return window

        def rank(request: Request) -> tuple[int, int, int]:
            if request.was_retracted:
                return -request.priority, 0, 0
            if request.overtaken >= PATIENCE:
                return -request.priority, 1, 0
            return -request.priority, 2, -cached_tokens(request)

        return sorted(window, key=rank)  # stable: otherwise in order of arrival

    def take(self, admitted: Collection[Request]) -> None:
        """Remove those that were admitted in one step, and count whom they have overtaken."""
        if not admitted:
            return
        behind: Counter[int] = Counter()  # by priority
        for request in reversed(list(islice(self, WINDOW))):
            if request in admitted:
                behind[request.priority] += 1
            else:
                request.overtaken += behind[request.priority]
        for request in admitted:
            self.remove(request)
