"""Mailboxes: the deltas of a request on their way from the scheduler to its handler."""

from __future__ import annotations

import asyncio
from itertools import chain

from mla_router.worker.generation import Logprobs
from mla_router.worker.messages import Delta
from mla_router.worker.server.errors import ApiError


class Mailbox:
    """The deltas of one HTTP request, in order of arrival.

    Deltas collect while the reader is busy, for instance with a slow client. The reader takes all of them in one
    wake-up.
    """

    __slots__ = ("_error", "_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[tuple[int, Delta]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: ApiError | None = None

    def put(self, index: int, delta: Delta) -> None:
        self._items.append((index, delta))
        self._wake()

    def fail(self, error: ApiError) -> None:
        self._error = error
        self._wake()

    async def take(self) -> list[tuple[int, Delta]]:
        """Waits for deltas. Returns all deltas since the last call, with their indices. Only one reader may call it.
        Raises ApiError after `fail`."""
        while not self._items:
            if self._error is not None:
                raise self._error
            await self._wait()
        items, self._items = self._items, []
        return items

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def make_mailbox(interval: int) -> Mailbox:
    return Mailbox() if interval == 1 else IntervalMailbox(interval)


class IntervalMailbox(Mailbox):
    """The mailbox of --stream-interval. It wakes its reader for the first and the last delta of a choice, and for every
    `interval` tokens between. It merges the deltas of each choice into one."""

    __slots__ = ("_held", "_interval", "_is_due")

    def __init__(self, interval: int) -> None:
        super().__init__()
        self._interval = interval
        self._held: dict[int, int] = {}  # tokens since the last `take`, by choice
        self._is_due = False

    def put(self, index: int, delta: Delta) -> None:
        is_first = index not in self._held
        self._held[index] = self._held.get(index, 0) + len(delta.token_ids)
        self._items.append((index, delta))
        if is_first or delta.finish_reason or self._held[index] >= self._interval:
            self._is_due = True
            self._wake()

    def fail(self, error: ApiError) -> None:
        self._is_due = True
        super().fail(error)

    async def take(self) -> list[tuple[int, Delta]]:
        while not self._is_due:
            await self._wait()
        items = await super().take()
        self._is_due = self._error is not None
        self._held = dict.fromkeys(self._held, 0)
        by_index: dict[int, list[Delta]] = {}
        for index, delta in items:
            by_index.setdefault(index, []).append(delta)
        return [(index, merge(deltas)) for index, deltas in by_index.items()]


def merge(deltas: list[Delta]) -> Delta:
    """Merges consecutive deltas of one choice."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return Delta(
        first.rid,
        list(chain.from_iterable(delta.token_ids for delta in deltas)),
        Logprobs.joined(logprobs) if logprobs else None,
        first.cached_tokens,
        last.finish_reason,
        last.error,
        first.prompt_logprobs,
        first.queue_seconds,
        last.accepted,
    )
