"""Reads request bodies, with limits on their size, their values and their pauses, and checks a router's signature."""

from __future__ import annotations

import asyncio

from aiohttp import web

from mla_router.worker.server.errors import ContentTooLarge, InvalidRequest, RequestTimeout
from mla_router.worker.server.http import signature
from mla_router.worker.server.http.turns import TURNS
from mla_router.worker.server.state import STATE, Service

STALLED_S = 30.0  # longest time without a byte; the total time has no limit

# Decoding holds the interpreter: running streams stop meanwhile, for seconds at tens of millions of values. Text and
# images have only a few values. The limit is 64 prompts of 8,192 token ids.
MAX_VALUES = 1 << 19
UNCOUNTED_BYTES = MAX_VALUES  # smaller bodies cannot have more

SIGNED = web.RequestKey("signed", bool)  # a router signed the request with the worker's key


async def read_body(request: web.Request) -> bytes:
    """Returns the whole body, when it is the request's turn. Raises ContentTooLarge (413), RequestTimeout (408) after a
    long pause, or InvalidRequest for more values than a prompt can have tokens."""
    body = await _receive(request)
    await request.app[TURNS].take()
    _check_values(body, request.app[STATE].service)
    key, given = request.app[STATE].config.replay_key, request.headers.get(signature.HEADER)
    if key and given:
        request[SIGNED] = signature.is_signed(key, request.raw_path, body, given)
    return body


def _check_values(body: bytes, service: Service | None) -> None:
    """Raises InvalidRequest if the body has too many JSON values, before they are decoded. Each value but the first of an
    array or object follows a comma. Commas and brackets in texts count as well: they are tokens."""
    if len(body) <= UNCOUNTED_BYTES:
        return
    limit = max(MAX_VALUES, 2 * service.limits.context_length) if service else MAX_VALUES
    values = sum(body.count(mark) for mark in (b",", b"[", b"{"))
    if values > limit:
        raise InvalidRequest(
            f"The body has about {values} values (numbers, strings, arrays, objects), and a request may have {limit}: "
            "divide it into several requests"
        )


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
