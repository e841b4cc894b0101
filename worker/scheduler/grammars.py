"""Requests with a grammar: the compilation of the grammar, and the token bitmasks of each step."""

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
    key: int  # of the grammar in the pool
    num_accepted: int  # leading output tokens that the grammar has accepted
    min_tokens: int


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The token bitmasks of a step, and further results of its grammars."""

    masks: TokenMasks | None = None
    stuck: list[tuple[Request, Problem]] = field(
        default_factory=list
    )  # requests that cannot continue
    forced: list[tuple[Request, list[int]]] = field(
        default_factory=list
    )  # tokens without an alternative


class GrammarRequests:
    """The scheduler's requests with a grammar. The scheduler ends each request that is returned with a problem."""

    def __init__(self, pool: Grammars | None) -> None:
        self._pool = pool
        self._entries: dict[str, _Entry] = {}  # by rid
        self._by_key: dict[int, _Entry] = {}  # the same entries
        self._compiling: set[int] = set()  # keys

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    @property
    def is_available(self) -> bool:
        return self._pool is not None

    def add(self, request: Request) -> None:
        """Starts the compilation of the request's grammar. `poll` returns the request when it can be admitted."""
        assert self._pool is not None, "requests with a grammar are refused on arrival"
        assert request.grammar is not None
        key = self._pool.open(request.grammar, request.output)
        # The bitmasks apply min_tokens: the engine would mask the stop tokens even where no other token is allowed.
        min_tokens = request.sampling.min_tokens
        request.sampling = msgspec.structs.replace(request.sampling, min_tokens=0)
        entry = _Entry(request, key, len(request.output), min_tokens)
        self._entries[request.rid] = self._by_key[key] = entry
        self._compiling.add(key)

    def poll(self) -> list[tuple[Request, Problem | None]]:
        """Returns requests whose grammar was compiled since the last call, now WAITING; and, with the problem, requests
        in any state whose grammar failed. Must be called between any two calls of `masks`."""
        if self._pool is None or not (self._compiling or self._pool.has_failures):
            return []
        polled = []
        for key, problem in self._pool.poll():
            request = self._by_key[key].request
            if problem is None:
                self._compiling.remove(key)
                request.move_to(State.WAITING)
            polled.append((request, problem))
        return polled

    def masks(self, step: Step) -> StepMasks:
        """Returns the token bitmasks of a step, after all tokens so far. Waits for the grammar workers while the device
        computes."""
        assert self._pool is not None
        rows, entries = [], []
        for row, request in enumerate(step.sampled):
            if request.grammar is not None and request.is_live:
                rows.append(row)
                entries.append(self._entries[request.rid])
        if not rows:
            return StepMasks()
        answers = self._pool.fill([(e.key, e.request.output[e.num_accepted :]) for e in entries])
        for entry in entries:
            entry.num_accepted = len(entry.request.output)
        bits = self._pool.masks[: len(rows)]
        for entry, mask in zip(entries, bits, strict=True):
            if len(entry.request.output) < entry.min_tokens:
                _mask_end(mask, self._pool.eos_ids | entry.request.sampling.stop_token_ids)
        return StepMasks(
            TokenMasks(tuple(rows), bits, self._pool.step),
            [(e.request, answers.failed[e.key]) for e in entries if e.key in answers.failed],
            [(e.request, answers.runs[e.key]) for e in entries if e.key in answers.runs],
        )

    def ends(self, request: Request, token: int) -> bool:
        """Returns whether `token` ends the grammar's text. It then ends the answer, even if the request ignores stop
        tokens, because no token can follow."""
        return (
            request.grammar is not None and self._pool is not None and token in self._pool.eos_ids
        )

    def remove(self, request: Request) -> None:
        """Removes a request that has ended."""
        if entry := self._entries.pop(request.rid, None):
            assert self._pool is not None
            del self._by_key[entry.key]
            self._compiling.discard(entry.key)
            self._pool.close(entry.key)


def _mask_end(mask: np.ndarray, end_ids: Iterable[int]) -> None:
    """Clears the bits of `end_ids` in `mask` [ceil(vocab / 32)] int32, unless it allows no other token."""
    longer = mask.copy()
    octets = longer.view(np.uint8)
    for token in end_ids:
        octets[token // 8] &= ~np.uint8(1 << token % 8)
    if longer.any():
        mask[:] = longer
