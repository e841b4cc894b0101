"""The waiting queue: requests that wait for admission, and their order.

Higher priorities come first. Within a priority, requests with a started answer come first: retracted requests, and
streams that another worker began, because their clients wait in the middle of an answer. The others follow by arrival
(fcfs), or by the least remaining work (lpm): by size class, then by the longest cached prefix, which may be evicted
later.

One step looks at a window of requests only: the oldest of each size class. So it finds a short request behind any number
of long ones.

No request starves under lpm. A request in the window that was overtaken `MAX_OVERTAKEN` times goes before all requests
that were overtaken less often, and in one step at most the rest of the window overtakes it. So fewer than
MAX_OVERTAKEN + WINDOW later requests of its priority are admitted before it. The exceptions (`admission.py`) are a request
that waits for memory, which others overtake with memory that it does not need, and one that waits until another request
has computed its prefix. Every size class has places in the window, so the oldest requests of each class are always in
the window, and the next ones move up.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice

from mla_router.worker.scheduler.prefill_budget import size_class
from mla_router.worker.scheduler.request import Request

# The number of requests that one step looks at.
WINDOW = 64
MAX_OVERTAKEN = 64


@dataclass(slots=True)
class Level:
    """The requests of one priority. Each deque is in order of arrival."""

    started: deque[Request] = field(default_factory=deque)
    by_class: dict[int, deque[Request]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Request]:
        yield from self.started
        for requests in self.by_class.values():
            yield from requests

    def window(self, most: int) -> list[Request]:
        """Returns up to `most` requests: those with a started answer, then the oldest of each size class in turn."""
        window = list(islice(self.started, most))
        lines = [iter(requests) for requests in self.by_class.values()]
        while lines and len(window) < most:
            longer = []
            for line in lines:
                if (request := next(line, None)) is not None:
                    window.append(request)
                    longer.append(line)
            lines = longer
        del window[most:]
        window[len(self.started) :] = sorted(
            window[len(self.started) :], key=lambda request: request.arrival
        )
        return window


class WaitingQueue:
    """The waiting requests of all priorities."""

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
        if request.has_started_answer:
            bisect.insort(level.started, request, key=lambda other: other.arrival)
        else:
            level.by_class.setdefault(self._class(request), deque()).append(request)
        self._length += 1
        self.num_arrivals += 1

    def remove(self, request: Request) -> None:
        level = self._levels[request.priority]
        if request.has_started_answer:
            level.started.remove(request)
        else:
            line = level.by_class[self._class(request)]
            line.remove(request)
            if not line:
                del level.by_class[self._class(request)]
        self._length -= 1
        if not level.started and not level.by_class:
            del self._levels[request.priority]

    def candidates(self, cached_tokens: Callable[[Request], int]) -> list[Request]:
        """Returns the requests of the window, best first. `cached_tokens` returns the length of a request's cached
        prefix."""
        window = self._window()
        if not self._least_work_first or len(window) == 1:
            return window

        def rank(request: Request) -> tuple[int, ...]:
            if request.has_started_answer:
                return -request.priority, 0
            if request.overtaken >= MAX_OVERTAKEN:
                return -request.priority, 1
            cached = cached_tokens(request)
            left = max(1, len(request.context) - cached)
            return -request.priority, 2, size_class(left), -cached

        return sorted(window, key=rank)  # stable: otherwise in order of arrival

    def take(self, admitted: Collection[Request]) -> None:
        """Removes the requests admitted in one step, and counts for the others in the window how many overtook them."""
        if not admitted:
            return
        admitted_after: Counter[int] = Counter()  # by priority
        for request in reversed(self._window()):
            if request in admitted:
                admitted_after[request.priority] += 1
            else:
                request.overtaken += admitted_after[request.priority]
        for request in admitted:
            self.remove(request)

    def _class(self, request: Request) -> int:
        return size_class(len(request.context)) if self._least_work_first else 0

    def _window(self) -> list[Request]:
        """Returns the window: by priority, then requests with a started answer, then in order of arrival."""
        window: list[Request] = []
        for priority in sorted(self._levels, reverse=True):
            if len(window) == WINDOW:
                break
            window += self._levels[priority].window(WINDOW - len(window))
        return window
