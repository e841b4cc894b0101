"""The metrics of one HTTP request: queue time, latencies, token counts, reasons of the end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mla_router.worker.messages import Delta
from mla_router.worker.server.metrics.metrics import Metrics
from mla_router.worker.server.requests.choice import Choice
from mla_router.worker.server.requests.timing import Timing


class RequestAccounting:
    """Observes the choices of one request. Times are monotonic."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begun = time.monotonic()

    def submitted(self) -> None:
        self._metrics.requests.inc()

    def received(self, choice: Choice, delta: Delta, now: float) -> None:
        """Counts `delta`, which `choice` has taken at `now`. The first one of a choice has its cached tokens."""
        metrics = self._metrics
        if choice.cached_here is None:
            choice.cached_here = min(delta.cached_tokens, choice.prompt_tokens)
            metrics.queue_time.observe(delta.queue_seconds)
            choice.queue_seconds = delta.queue_seconds
            if choice.cached_tokens is None:
                choice.cached_tokens = choice.cached_here
        if tokens := len(delta.token_ids):
            if choice.last_token_at == 0.0:
                metrics.time_to_first_token.observe(now - self._begun)
                choice.first_token_at = now
            else:
                metrics.inter_token_latency.observe((now - choice.last_token_at) / tokens)
            choice.last_token_at = now

    def timing(self, choices: Sequence[Choice]) -> Timing | None:
        """Returns the durations of the request; None before the first token."""
        begun = [choice for choice in choices if choice.first_token_at]
        if not begun:
            return None
        return Timing.of(
            begun=self._begun,
            queued=max(choice.queue_seconds for choice in begun),
            first=min(choice.first_token_at for choice in begun),
            last=max(choice.last_token_at for choice in begun),
            tokens=sum(choice.completion_tokens for choice in begun),
            choices=len(begun),
        )

    def ended(self, choice: Choice, reason: str) -> None:
        """`reason` is a FinishReason value."""
        seconds = time.monotonic() - self._begun
        self._metrics.ended(reason, seconds, choice.prompt_tokens, choice.completion_tokens)
