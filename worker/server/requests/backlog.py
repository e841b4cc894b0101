"""How much work may wait in a worker: beyond that a request is refused as it comes, so that another worker can
have it, or its client comes back later.

Two bounds. Requests: as many may wait as run at a time, unless --max-queued-requests says otherwise. Seconds: nobody
is taken behind prompts that take the device longer than --max-queued-seconds, at the speed that the scheduler
measures. On a GPU the first bound comes first, on a slow device with long prompts the second.
"""

from __future__ import annotations

import math

from mla_router.worker.config import WorkerConfig
from mla_router.worker.messages import Ready
from mla_router.worker.server.errors import TooManyRequests
from mla_router.worker.server.ipc.scheduler_client import SchedulerClient


def check_backlog(
    config: WorkerConfig, limits: Ready, scheduler: SchedulerClient, requests: int
) -> None:
    """Raises TooManyRequests if there is no room for so many more."""
    queued = config.max_queued_requests or limits.max_running_requests
    if scheduler.open_requests + requests > queued + limits.max_running_requests:
        raise TooManyRequests(
            f"{scheduler.open_requests} requests are running or waiting; try later",
            code="queue_full",
            retry_after=1,
        )
    ahead, most = scheduler.waiting_s, config.max_queued_seconds
    if 0.0 < most < ahead:
        raise TooManyRequests(
            f"the prompts that wait take about {ahead:.0f} s, and --max-queued-seconds allows {most:g} s; "
            "try later",
            code="queue_slow",
            retry_after=max(1, math.ceil(ahead - most)),
        )
