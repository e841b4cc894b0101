"""The duration of one request, in vLLM's form (`metrics` of an answer)."""

from __future__ import annotations

import msgspec


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Durations over all choices of the request, in milliseconds."""

    queue_time_ms: float
    time_to_first_token_ms: float  # from the end of the queue time
    generation_time_ms: float  # from the first token to the last
    # Inter-token latency; absent if no choice has two tokens
    mean_itl_ms: float | msgspec.UnsetType = msgspec.UNSET
    tokens_per_second: float  # between the end of the queue time and the last token

    @classmethod
    def of(
        cls, *, begun: float, queued: float, first: float, last: float, tokens: int, choices: int
    ) -> Timing:
        """`begun`, `first` and `last` are the times of the submission, the first and the last token, in seconds of one
        clock. `queued` is a duration in seconds."""
        started = min(begun + queued, first)  # the scheduler measures `queued` by its own clock
        gaps = tokens - choices
        taken = last - started
        return cls(
            queue_time_ms=queued * 1000,
            time_to_first_token_ms=(first - started) * 1000,
            generation_time_ms=(last - first) * 1000,
            mean_itl_ms=(last - first) * choices / gaps * 1000 if gaps > 0 else msgspec.UNSET,
            tokens_per_second=tokens / taken if taken > 0 else 0.0,
        )
