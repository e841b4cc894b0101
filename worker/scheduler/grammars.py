"""Requests whose output must be a sentence of a grammar: until that is compiled, and in each step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

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
    min_tokens: int


@dataclass(frozen=True, slots=True)
class Masked:
    """What grammars say of a step."""

    masks: TokenMasks | None = None
    stuck: list[tuple[Request, Problem]] = field(default_factory=list)  # they cannot go on
    runs: list[tuple[Request, list[int]]] = field(default_factory=list)  # this, and nothing else


class GrammarRequests:
    """What the scheduler asks of the pool. What it returns with a problem is to be ended."""

    def __init__(self, pool: Grammars | None) -> None:
        self._pool = pool
        self._entries: dict[str, _Entry] = {}  # by rid
        self._by_key: dict[int, _Entry] = {}  # the same
        self._compiling: set[int] = set()  # keys

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    @property
    def is_available(self) -> bool:
        return self._pool is not None

    def add(self, request: Request) -> None:
        """Begin with a request that has a grammar; `news` tells when it can be admitted."""
        assert self._pool is not None, "refused on arrival"
        assert request.grammar is not None
        key = self._pool.open(request.grammar, request.output)
        # Masks keep to it: the engine would ban the end where the grammar allows nothing else.
        min_tokens = request.sampling.min_tokens
        request.sampling = msgspec.structs.replace(request.sampling, min_tokens=0)
        entry = _Entry(request, key, len(request.output), min_tokens)
        self._entries[request.rid] = self._by_key[key] = entry
        self._compiling.add(key)

    def news(self) -> list[tuple[Request, Problem | None]]:
        """Requests whose wait is over since the last call, now waiting for admission; and those, in whatever
        state, that cannot go on, with the reason. To be asked between any two calls of `masks`."""
        if self._pool is None or not (self._compiling or self._pool.has_failures):
            return []
        news = []
        for key, problem in self._pool.poll():
            request = self._by_key[key].request
            if problem is None:
                self._compiling.remove(key)
                request.move_to(State.WAITING)
            news.append((request, problem))
        return news

    def masks(self, step: Step) -> Masked:
        """What the rows of a step may draw, after all that they have drawn. Waits for the grammars'
        processes, while the device computes."""
        assert self._pool is not None
        rows, entries = [], []
        for row, request in enumerate(step.sampled):
            if request.grammar is not None and request.is_live:
                rows.append(row)
                entries.append(self._entries[request.rid])
        if not rows:
            return Masked()
        answers = self._pool.fill([(e.key, e.request.output[e.heard :]) for e in entries])
        for entry in entries:
            entry.heard = len(entry.request.output)
        # A copy: the next step's masks may be written before this step has been sampled.
        bits = self._pool.masks[: len(rows)].copy()
        for entry, mask in zip(entries, bits, strict=True):
            if len(entry.request.output) < entry.min_tokens:
                _forbid_end(mask, self._pool.eos_ids | entry.request.sampling.stop_token_ids)
        return Masked(
            TokenMasks(tuple(rows), bits),
            [(e.request, answers.failed[e.key]) for e in entries if e.key in answers.failed],
            [(e.request, answers.runs[e.key]) for e in entries if e.key in answers.runs],
        )

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
            del self._by_key[entry.key]
            self._compiling.discard(entry.key)
            self._pool.close(entry.key)


def _forbid_end(mask: np.ndarray, end_ids: Iterable[int]) -> None:
    """Take `end_ids` out of `mask` [ceil(vocab / 32)] int32, unless it allows nothing else."""
    longer = mask.copy()
    octets = longer.view(np.uint8)
    for token in end_ids:
        octets[token // 8] &= ~np.uint8(1 << token % 8)
    if longer.any():
        mask[:] = longer
