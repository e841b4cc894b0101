"""Requests with a grammar: the compilation of the grammar, and the token bitmasks of each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from mla_router.worker.grammar.errors import Problem
from mla_router.worker.grammar.pool import GrammarPool
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.scheduler.step import Step
from mla_router.worker.step.plan import TokenMasks


@dataclass(slots=True)
class _Entry:
    request: Request
    key: int  # of the request in the pool
    num_accepted: int  # leading output tokens that the grammar has accepted
    min_tokens: int
    drafts: list[int] = field(default_factory=list)  # that the device has; empty: not known here


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The token bitmasks of a step, and further results of its grammars."""

    masks: TokenMasks | None = None
    # Maximum number of tokens that the step gives to each request with bitmasks
    limits: list[tuple[Request, int]] = field(default_factory=list)
    # Requests that cannot continue
    stuck: list[tuple[Request, Problem]] = field(default_factory=list)
    # Tokens without an alternative
    forced: list[tuple[Request, list[int]]] = field(default_factory=list)


class GrammarRequests:
    """The scheduler's requests with a grammar. The scheduler ends each request that is returned with a problem."""

    def __init__(self, pool: GrammarPool | None) -> None:
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
        rows, entries, drafts = [], [], []
        for row, request in enumerate(step.sampled):
            if request.grammar is not None and request.is_live:
                rows.append(row)
                entries.append(entry := self._entries[request.rid])
                verifies = row < len(step.plan.decode_slots)
                drafts.append(entry.drafts[: step.plan.num_drafts] if verifies else [])
        if not rows:
            return StepMasks()
        asked = [(e.key, e.request.output[e.num_accepted :]) for e in entries]
        answers = self._pool.fill(asked, drafts)
        for entry in entries:
            entry.num_accepted = len(entry.request.output)
        counts = [answers.counts.get(entry.key, 1) for entry in entries]
        bits = _first_of_each(self._pool.masks, counts, [1 + len(some) for some in drafts])
        drafts_before = [ahead for count in counts for ahead in range(count)]
        owners = [entry for entry, count in zip(entries, counts, strict=True) for _ in range(count)]
        for entry, ahead, mask in zip(owners, drafts_before, bits, strict=True):
            if len(entry.request.output) + ahead < entry.min_tokens:
                _mask_end(mask, self._pool.eos_ids | entry.request.sampling.stop_token_ids)
        return StepMasks(
            TokenMasks(tuple(rows), bits, self._pool.step, tuple(counts)),
            [(e.request, count) for e, count in zip(entries, counts, strict=True)],
            [(e.request, answers.failed[e.key]) for e in entries if e.key in answers.failed],
            [(e.request, answers.runs[e.key]) for e in entries if e.key in answers.runs],
        )

    def keep_drafts(self, step: Step, drafts: list[list[int]] | None) -> None:
        """Keeps the drafts that a step has made, aligned with its sampled requests. None: it has made none, and the drafts
        of earlier steps may no longer be on the device."""
        for row, request in enumerate(step.sampled):
            if entry := self._entries.get(request.rid):
                entry.drafts = drafts[row] if drafts else []

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


def _first_of_each(masks: np.ndarray, counts: Sequence[int], spaces: Sequence[int]) -> np.ndarray:
    """Returns the first `counts[i]` of each run of `spaces[i]` adjacent `masks`, moved next to each other in place."""
    total = sum(counts)
    if total < sum(spaces):
        starts = np.cumsum(spaces) - spaces
        kept = [
            start + rank
            for start, count in zip(starts, counts, strict=True)
            for rank in range(count)
        ]
        masks[:total] = masks[kept]
    return masks[:total]


def _mask_end(mask: np.ndarray, end_ids: Iterable[int]) -> None:
    """Clears the bits of `end_ids` in `mask` [ceil(vocab / 32)] int32, unless it allows no other token."""
    longer = mask.copy()
    octets = longer.view(np.uint8)
    for token in end_ids:
        octets[token // 8] &= ~np.uint8(1 << token % 8)
    if longer.any():
        mask[:] = longer
