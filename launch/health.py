"""Polls a worker's /health. http.client ignores proxy settings, which must not apply to local workers."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Callable

from mla_router.worker.heartbeat_watch import STUCK_FACTOR

TIMEOUT_S = 1.0  # of a check
POLL_S = 0.2  # between checks of a worker that starts
SILENT_CHECKS = 4  # checks within the time after which a worker is silent


async def until_healthy(host: str, port: int) -> None:
    """Waits without limit until /health returns 200."""
    while await asyncio.to_thread(_status, host, port, TIMEOUT_S) != http.client.OK:
        await asyncio.sleep(POLL_S)


async def until_silent(
    host: str, port: int, watchdog_s: float, show: Callable[[str], None]
) -> None:
    """Waits until /health has had no answer, of any status, for STUCK_FACTOR times `watchdog_s`, and reports to `show` that
    the worker is killed, which is up to the caller. Several checks in a row must fail: if this process was stopped as well,
    that time does not count."""
    seconds = STUCK_FACTOR * watchdog_s
    period = seconds / SILENT_CHECKS
    silent = 0
    while silent < SILENT_CHECKS:
        status, _ = await asyncio.gather(
            asyncio.to_thread(_status, host, port, period), asyncio.sleep(period)
        )
        silent = silent + 1 if status is None else 0
    show(f"no answer for {seconds:g} seconds, and is killed")


def _status(host: str, port: int, timeout_s: float) -> int | None:
    """Returns the status of /health; None without an answer."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()  # else the close would reset the connection
        return response.status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
