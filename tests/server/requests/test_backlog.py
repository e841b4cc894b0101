"""The limits of waiting work, in requests and in seconds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mla_router.worker.config import WorkerConfig
from mla_router.worker.messages import Ready
from mla_router.worker.server.errors import TooManyRequests
from mla_router.worker.server.requests.backlog import check_backlog

# Eight running requests
LIMITS = Ready(4096, 16, 8, 1024, 100, "cpu", "float32", "float32", "torch")


def check(requests: int = 1, *, running: int = 0, waiting_s: float = 0.0, **flags: Any) -> None:
    scheduler: Any = SimpleNamespace(
        open_requests=running, waiting_prompts=SimpleNamespace(seconds=waiting_s)
    )
    check_backlog(WorkerConfig(**flags), LIMITS, scheduler, requests)


def test_as_many_wait_as_run_unless_a_flag_says_otherwise() -> None:
    check(16)
    check(running=15)
    check(3, running=8, max_queued_requests=3)
    for requests, running, flags in [(17, 0, {}), (1, 16, {}), (4, 8, {"max_queued_requests": 3})]:
        with pytest.raises(TooManyRequests) as refused:
            check(requests, running=running, **flags)
        assert (refused.value.body.error.code, refused.value.retry_after) == ("queue_full", 1)
    for waiting_s, retry_after in [(3.2, 4), (1e6, 60)]:
        with pytest.raises(TooManyRequests) as refused:
            check(17, waiting_s=waiting_s)
        assert refused.value.retry_after == retry_after


def test_no_request_is_accepted_behind_slow_prompts() -> None:
    check(waiting_s=30.0, max_queued_seconds=30.0)
    check(waiting_s=31.0, max_queued_seconds=40.0)
    check(waiting_s=1e6)  # no limit by default
    with pytest.raises(TooManyRequests, match=r"31 s.*30 s") as refused:
        check(waiting_s=31.4, max_queued_seconds=30.0)
    assert refused.value.body.error.code == "queue_slow"
    assert refused.value.retry_after == 2
