"""Requests whose grammar has no process yet, in two lines.

A grammar comes into the quick line and is given a short try. One that takes longer comes into the slow
line, where it has its full time but fewer places. So a new grammar of usual size waits for short tries
alone, however many dear ones there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mla_router.worker.messages import Grammar


@dataclass(slots=True)
class Waiting:
    """One request."""

    key: int
    output: Sequence[int]  # what was generated for it before
    since: float  # time of its arrival, of `time.monotonic`


Line = dict[Grammar, list[Waiting]]  # in order of arrival


class CompileQueues:
    """The two lines. A grammar stands in one of them at most."""

    def __init__(self) -> None:
        self._quick: Line = {}
        self._slow: Line = {}
        self._grammars: dict[int, Grammar] = {}  # by key, of all requests here

    def add(self, grammar: Grammar, waiting: Waiting, *, slow: bool = False) -> None:
        line = self._slow if slow or grammar in self._slow else self._quick
        line.setdefault(grammar, []).append(waiting)
        self._grammars[waiting.key] = grammar

    def next(self, *, slow: bool) -> Grammar | None:
        """The grammar that has waited longest in a line."""
        return next(iter(self._slow if slow else self._quick), None)

    def take(self, grammar: Grammar) -> list[Waiting]:
        """All requests of a grammar, which leave."""
        line = self._slow if grammar in self._slow else self._quick
        taken = line.pop(grammar, [])
        for waiting in taken:
            del self._grammars[waiting.key]
        return taken

    def remove(self, key: int) -> bool:
        """Let a request leave; False if it is not here."""
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
        """Keys of the requests that have waited since `time`, or longer."""
        return [waiting.key for waiting in self._all() if waiting.since <= time]

    def _all(self) -> Iterator[Waiting]:
        for line in (self._quick, self._slow):
            for requests in line.values():
                yield from requests
