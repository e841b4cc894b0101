"""The two queues of requests whose grammar has no process yet.

A grammar enters the quick queue and gets a short compilation. If this is not enough, it enters the slow queue, with its
full time and fewer places. So a usual grammar waits for short compilations only, even beside many expensive grammars.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mla_router.worker.messages import Grammar


@dataclass(frozen=True, slots=True)
class Waiting:
    """One waiting request."""

    key: int
    output: Sequence[int]  # tokens that were generated before
    since: float  # monotonic time of its arrival
    is_retried: bool = False  # an earlier process of its grammar was lost


Queue = dict[Grammar, list[Waiting]]  # in order of arrival


class CompileQueues:
    """Both queues. A grammar is in at most one of them."""

    def __init__(self) -> None:
        self._quick: Queue = {}
        self._slow: Queue = {}
        self._grammars: dict[int, Grammar] = {}  # by the key of a request

    def add(self, grammar: Grammar, waiting: Waiting, *, slow: bool = False) -> None:
        line = self._slow if slow or grammar in self._slow else self._quick
        line.setdefault(grammar, []).append(waiting)
        self._grammars[waiting.key] = grammar

    def next(self, *, slow: bool) -> Grammar | None:
        """Returns the grammar that has waited longest in a queue; None if the queue is empty."""
        return next(iter(self._slow if slow else self._quick), None)

    def take(self, grammar: Grammar) -> list[Waiting]:
        """Removes and returns all requests of a grammar."""
        line = self._slow if grammar in self._slow else self._quick
        taken = line.pop(grammar, [])
        for waiting in taken:
            del self._grammars[waiting.key]
        return taken

    def remove(self, key: int) -> bool:
        """Removes a request. Returns False if it is in no queue."""
        grammar = self._grammars.pop(key, None)
        if grammar is None:
            return False
        line = self._slow if grammar in self._slow else self._quick
        left = [waiting for waiting in line[grammar] if waiting.key != key]
        if left:
            line[grammar] = left
        else:
            del line[grammar]
        return True

    def waiting_since(self, time: float) -> list[int]:
        """Returns the keys of the requests that arrived at `time` or before."""
        return [waiting.key for waiting in self._all() if waiting.since <= time]

    def _all(self) -> Iterator[Waiting]:
        for line in (self._quick, self._slow):
            for requests in line.values():
                yield from requests
