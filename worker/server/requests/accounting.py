"""The metrics of one HTTP request: queue time, latencies, token counts, reasons of the end."""

from __future__ import annotations

import time

from mla_router.worker.messages import Delta
from mla_router.worker.server.metrics.metrics import Metrics
from mla_router.worker.server.requests.choice import Choice


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
            if choice.cached_tokens is None:
                choice.cached_tokens = choice.cached_here
        if tokens := len(delta.token_ids):
            if choice.last_token_at == 0.0:
                metrics.time_to_first_token.observe(now - self._begun)
            else:
                metrics.inter_token_latency.observe((now - choice.last_token_at) / tokens)
            choice.last_token_at = now

    def ended(self, choice: Choice, reason: str) -> None:
        """`reason` is a FinishReason value."""
        seconds = time.monotonic() - self._begun
        self._metrics.ended(reason, seconds, choice.prompt_tokens, choice.completion_tokens)
