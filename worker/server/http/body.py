"""The reading of request bodies: bounded in size and in the pauses of their sender, and whether a router has
signed them."""

from __future__ import annotations

import asyncio

from aiohttp import web

from mla_router.worker.server.errors import ContentTooLarge, RequestTimeout
from mla_router.worker.server.http import signature
from mla_router.worker.server.state import STATE

STALLED_S = 30.0  # without a byte; a slow client may take as long as it likes


SIGNED = web.RequestKey("signed", bool)  # by a router that has our key


async def read_body(request: web.Request) -> bytes:
    """All of it. Raises ContentTooLarge (413), and RequestTimeout (408) if it stalls on its way."""
    body = await _receive(request)
    key, given = request.app[STATE].config.replay_key, request.headers.get(signature.HEADER)
    if key and given:
        request[SIGNED] = signature.is_signed(key, request.raw_path, body, given)
    return body


async def _receive(request: web.Request) -> bytes:
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
