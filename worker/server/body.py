"""The reading of request bodies: bounded in size, and in how long their sender may do nothing."""

from __future__ import annotations

import asyncio

from aiohttp import web

from mla_router.worker.server.errors import ContentTooLarge, RequestTimeout
from mla_router.worker.server.state import STATE

STALLED_S = 30.0  # without a byte; a slow client may take as long as it likes


async def read_body(request: web.Request) -> bytes:
    """All of it. Raises ContentTooLarge (413), and RequestTimeout (408) if it stalls on its way."""
    if request.content.is_eof():
        return await request.read()  # all here already, as small ones are: nothing to wait for
    limit = request.app[STATE].config.max_payload_size
    body = bytearray()
    while True:
        try:
            chunk = await asyncio.wait_for(request.content.readany(), STALLED_S)
        except (TimeoutError, asyncio.TimeoutError):  # two classes until Python 3.11
            raise RequestTimeout(
                f"The body stopped after {len(body)} bytes; {STALLED_S:g} seconds is what it may "
                "pause"
            ) from None
        if not chunk:
            return bytes(body)
        body += chunk
        if len(body) > limit:
            raise ContentTooLarge(f"The body has more than {limit} bytes")
