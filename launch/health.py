"""Polls a worker's /health. http.client ignores proxy settings, which must not apply to local workers."""

from __future__ import annotations

import asyncio
import http.client

TIMEOUT_S = 1.0
POLL_S = 0.2


async def until_healthy(host: str, port: int) -> None:
    """Waits without limit until /health returns 200."""
    while not await asyncio.to_thread(_is_healthy, host, port):
        await asyncio.sleep(POLL_S)


def _is_healthy(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()  # else the close would reset the connection
        return response.status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
