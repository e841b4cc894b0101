"""Reads request bodies, with limits on their size and their pauses, and checks a router's signature."""

from __future__ import annotations

import asyncio

from aiohttp import web

from mla_router.worker.server.errors import ContentTooLarge, RequestTimeout
from mla_router.worker.server.http import signature
from mla_router.worker.server.http.turns import TURNS
from mla_router.worker.server.state import STATE

STALLED_S = 30.0  # longest time without a byte; the total time has no limit

SIGNED = web.RequestKey("signed", bool)  # a router signed the request with the worker's key


async def read_body(request: web.Request) -> bytes:
    """Returns the whole body, when it is the request's turn. Raises ContentTooLarge (413), or RequestTimeout (408) after a
    long pause."""
    body = await _receive(request)
    await request.app[TURNS].take()
    key, given = request.app[STATE].config.replay_key, request.headers.get(signature.HEADER)
    if key and given:
        request[SIGNED] = signature.is_signed(key, request.raw_path, body, given)
    return body


async def _receive(request: web.Request) -> bytes:
    if request.content.is_eof():
        return await request.read()  # small bodies arrive with the head
    limit = request.app[STATE].config.max_payload_size
    body = bytearray()
    while True:
        try:
            chunk = await asyncio.wait_for(request.content.readany(), STALLED_S)
        except TimeoutError:
            raise RequestTimeout(
                f"The body stopped after {len(body)} bytes; it may pause for at most {STALLED_S:g} "
                "seconds"
            ) from None
        if not chunk:
            return bytes(body)
        body += chunk
        if len(body) > limit:
            raise ContentTooLarge(f"The body has more than {limit} bytes")
