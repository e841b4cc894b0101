"""Limits of the waiting work in a worker. A request above them gets a 429, so that another worker can take it.

Requests: --max-queued-requests may wait, by default as many as may run. Seconds: if --max-queued-seconds is set, the
waiting prompts may not need more device time, at the speed that the scheduler measures.
"""

from __future__ import annotations

import math

from mla_router.worker.config import WorkerConfig
from mla_router.worker.messages import Ready
from mla_router.worker.server.errors import TooManyRequests
from mla_router.worker.server.ipc.scheduler_client import SchedulerClient

MAX_RETRY_AFTER = 60  # some of OpenAI's clients ignore a longer time


def check_backlog(
    config: WorkerConfig, limits: Ready, scheduler: SchedulerClient, requests: int
) -> None:
    """Raises TooManyRequests if the worker has no room for `requests` more."""
    queued = config.max_queued_requests or limits.max_running_requests
    ahead, limit = scheduler.waiting_prompts.seconds, config.max_queued_seconds
    if scheduler.open_requests + requests > queued + limits.max_running_requests:
        raise TooManyRequests(
            f"{scheduler.open_requests} requests are running or waiting; try later",
            code="queue_full",
            retry_after=_retry_after(ahead),  # the waiting prompts come first
        )
    if 0.0 < limit < ahead:
        raise TooManyRequests(
            f"the prompts that wait take about {ahead:.0f} s, and --max-queued-seconds allows {limit:g} s; "
            "try later",
            code="queue_slow",
            retry_after=_retry_after(ahead - limit),
        )


def _retry_after(seconds: float) -> int:
    return min(max(1, math.ceil(seconds)), MAX_RETRY_AFTER)
