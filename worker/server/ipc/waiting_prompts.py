"""The device time that the waiting prompts of a worker need."""

from __future__ import annotations

from mla_router.worker.messages import Stats
from mla_router.worker.server.ipc.shared_counters import Count


class WaitingPrompts:
    """The prompts of this process that have no delta yet. `seconds` counts those of all API processes."""

    def __init__(self, seconds: Count) -> None:
        self._all = seconds
        self._own: dict[str, float] = {}  # estimated seconds, by rid

    @property
    def seconds(self) -> float:
        """The estimated seconds of all waiting prompts, without cached prefixes."""
        return self._all.total

    def add(self, rid: str, tokens: int, stats: Stats) -> None:
        """Adds a prompt of `tokens` tokens, at the speed in `stats`."""
        seconds = tokens * (stats.token_s + tokens / 2 * stats.context_s)
        self._own[rid] = seconds
        self._all.add(seconds)

    def remove(self, rid: str) -> None:
        """Removes a prompt, unless it is gone already."""
        if (seconds := self._own.pop(rid, None)) is not None:
            # 0 for an empty queue, so that rounding errors do not add up.
            self._all.set(self._all.own - seconds if self._own else 0.0)

    def clear(self) -> None:
        self._own.clear()
        self._all.set(0)
