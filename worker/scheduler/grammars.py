"""Requests whose output must be a sentence of a grammar: until that is compiled, and in each step."""

from __future__ import annotations

from dataclasses import dataclass

from mla_router.worker.core import TokenMasks
from mla_router.worker.grammar.errors import Problem
from mla_router.worker.grammar.pool import Grammars
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.scheduler.step import Step


@dataclass(slots=True)
class _Entry:
    request: Request
    key: int  # what the pool knows it by
    heard: int  # leading tokens of its output that its grammar has been told


class GrammarRequests:
    """What the scheduler asks of the pool. What it returns with a problem is to be ended."""

    def __init__(self, pool: Grammars | None) -> None:
        self._pool = pool
        self._entries: dict[str, _Entry] = {}  # by rid
        self._compiling: dict[int, _Entry] = {}  # by key

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    @property
    def is_available(self) -> bool:
        return self._pool is not None

    def add(self, request: Request) -> None:
        """Begin with a request that has a grammar; `compiled` tells when it can be admitted."""
        assert self._pool is not None, "refused on arrival"
        assert request.grammar is not None
        key = self._pool.open(request.grammar, request.output)
        entry = _Entry(request, key, len(request.output))
        self._entries[request.rid] = self._compiling[key] = entry

    def compiled(self) -> list[tuple[Request, Problem | None]]:
        """Requests whose wait is over since the last call, now waiting for admission; or with what
        is in their way."""
        if self._pool is None or not self._compiling:
            return []
        over = []
        for key, problem in self._pool.poll():
            request = self._compiling.pop(key).request
            if problem is None:
                request.move_to(State.WAITING)
            over.append((request, problem))
        return over

    def masks(self, step: Step) -> tuple[TokenMasks | None, list[tuple[Request, Problem]]]:
        """What the rows of a step may draw, after all that they have drawn; and the requests that
        cannot go on. Waits for the grammars' processes, while the device computes."""
        assert self._pool is not None
        rows, entries = [], []
        for row, request in enumerate(step.sampled):
            if request.grammar is not None and request.is_live:
                rows.append(row)
                entries.append(self._entries[request.rid])
        if not rows:
            return None, []
        failed = self._pool.fill([(e.key, e.request.output[e.heard :]) for e in entries])
        for entry in entries:
            entry.heard = len(entry.request.output)
        # A copy: the next step's masks may be written before this step has been sampled.
        masks = TokenMasks(tuple(rows), self._pool.masks[: len(rows)].copy())
        return masks, [(e.request, failed[e.key]) for e in entries if e.key in failed]

    def ends(self, request: Request, token: int) -> bool:
        """Whether this token ends the sentence. It ends the answer then, whatever the request says
        of stop tokens, because nothing can come after it."""
        return (
            request.grammar is not None and self._pool is not None and token in self._pool.eos_ids
        )

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        if entry := self._entries.pop(request.rid, None):
            assert self._pool is not None
            self._compiling.pop(entry.key, None)
            self._pool.close(entry.key)
