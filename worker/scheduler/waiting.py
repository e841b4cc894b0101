"""The requests that wait for a place, and which of them is next.

Order: higher priority first; within one, those whose answers have begun: retracted ones, and streams of
workers that broke, whose readers wait in the middle of a sentence; then either arrival (fcfs), or the least work left (lpm): classes of size, and within one the longest cached prefix,
since what is cached now may be evicted later.

Only some requests are looked at in one step, the window: of each class of size the oldest. So a short request
is seen behind any number of long ones.

Nobody starves under lpm. A request in the window that has been overtaken `PATIENCE` times goes before all that
have not, and in one step it can be overtaken by the rest of the window at most. So fewer than
PATIENCE + WINDOW are admitted before it that came later and have its priority, unless it waits for memory:
those that pass it then have memory that it does not count on (`admission.py`). And as every class has its
places in the window, the oldest of each class are always in it: the turn of those behind them comes.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice

from mla_router.worker.scheduler.division import size_class
from mla_router.worker.scheduler.request import Request

# Requests that are looked at in one step; those behind them keep their places.
WINDOW = 64
PATIENCE = 64


@dataclass(slots=True)
class Level:
    """The requests of one priority, each deque in order of arrival."""

    begun: deque[Request] = field(default_factory=deque)
    by_class: dict[int, deque[Request]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Request]:
        yield from self.begun
        for requests in self.by_class.values():
            yield from requests

    def window(self, most: int) -> list[Request]:
        """Those that have begun, then the first of each class in turn."""
        window = list(islice(self.begun, most))
        lines = [iter(requests) for requests in self.by_class.values()]
        while lines and len(window) < most:
            longer = []
            for line in lines:
                if (request := next(line, None)) is not None:
                    window.append(request)
                    longer.append(line)
            lines = longer
        del window[most:]
        window[len(self.begun) :] = sorted(
            window[len(self.begun) :], key=lambda request: request.arrival
        )
        return window


class WaitingQueue:
    """A level for each priority."""

    def __init__(self, *, least_work_first: bool) -> None:
        self._least_work_first = least_work_first
        self._levels: dict[int, Level] = {}
        self._length = 0
        self.num_arrivals = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        for priority in sorted(self._levels, reverse=True):
            yield from self._levels[priority]

    def add(self, request: Request) -> None:
        level = self._levels.setdefault(request.priority, Level())
        if request.has_begun:
            bisect.insort(level.begun, request, key=lambda other: other.arrival)
        else:
            level.by_class.setdefault(self._class(request), deque()).append(request)
        self._length += 1
        self.num_arrivals += 1

    def remove(self, request: Request) -> None:
        level = self._levels[request.priority]
        if request.has_begun:
            level.begun.remove(request)
        else:
            line = level.by_class[self._class(request)]
            line.remove(request)
            if not line:
                del level.by_class[self._class(request)]
        self._length -= 1
        if not level.begun and not level.by_class:
            del self._levels[request.priority]

    def candidates(self, cached_tokens: Callable[[Request], int]) -> list[Request]:
        """The requests of the window, best first."""
        window = self._window()
        if not self._least_work_first or len(window) == 1:
            return window

        def rank(request: Request) -> tuple[int, int, int, int]:
            if request.has_begun:
                return -request.priority, 0, 0, 0
            if request.overtaken >= PATIENCE:
                return -request.priority, 1, 0, 0
            cached = cached_tokens(request)
            left = max(1, len(request.context) - cached)
            return -request.priority, 2, size_class(left), -cached

        return sorted(window, key=rank)  # stable: otherwise in order of arrival

    def take(self, admitted: Collection[Request]) -> None:
        """Remove those that were admitted in one step, and count which ones they have overtaken."""
        if not admitted:
            return
        behind: Counter[int] = Counter()  # by priority
        for request in reversed(self._window()):
            if request in admitted:
                behind[request.priority] += 1
            else:
                request.overtaken += behind[request.priority]
        for request in admitted:
            self.remove(request)

    def _class(self, request: Request) -> int:
        return size_class(len(request.context)) if self._least_work_first else 0

    def _window(self) -> list[Request]:
        """Highest priority first, then in order of arrival, but for those that have begun."""
        window: list[Request] = []
        for priority in sorted(self._levels, reverse=True):
            if len(window) == WINDOW:
                break
            window += self._levels[priority].window(WINDOW - len(window))
        return window
