"""--stream-interval: several tokens of an answer come as one piece, which costs server and client less."""

from __future__ import annotations

from itertools import chain

from mla_router.worker.core import Logprobs
from mla_router.worker.messages import Delta
from mla_router.worker.server.errors import ApiError
from mla_router.worker.server.ipc.scheduler_client import Mailbox


def make_mailbox(interval: int) -> Mailbox:
    return Mailbox() if interval == 1 else IntervalMailbox(interval)


class IntervalMailbox(Mailbox):
    """Wakes its reader for the first delta of a prompt, for its last, and for every `interval` tokens
    between; then it has one delta a prompt."""

    __slots__ = ("_held", "_interval", "_is_due")

    def __init__(self, interval: int) -> None:
        super().__init__()
        self._interval = interval
        self._held: dict[int, int] = {}  # tokens since the last that were taken, by prompt
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
    """Deltas of one request that follow each other, as one."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    return Delta(
        first.rid,
        list(chain.from_iterable(delta.token_ids for delta in deltas)),
        _merge_logprobs([delta.logprobs for delta in deltas if delta.logprobs is not None]),
        first.cached_tokens,
        last.finish_reason,
        last.error,
        first.prompt_logprobs,
        first.queue_seconds,
    )


def _merge_logprobs(logprobs: list[Logprobs]) -> Logprobs | None:
    if not logprobs:
        return None
    return Logprobs(
        list(chain.from_iterable(one.logprobs for one in logprobs)),
        list(chain.from_iterable(one.top_ids for one in logprobs)),
        list(chain.from_iterable(one.top_logprobs for one in logprobs)),
    )
