"""Answers as a stream of server-sent events.

The status line of a stream goes out with its first event, so that an error before the first token
still gets its own status. Once a stream has begun, an error is an event of its own, and `[DONE]`
never follows it: a client can tell a broken answer from a complete one.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from mla_router.worker.server.errors import ApiError, InternalError
from mla_router.worker.server.http.json_response import encode

log = logging.getLogger(__name__)

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies such as nginx hold streams back otherwise
}
DONE = b"data: [DONE]\n\n"
HOLE = "\0"


def event(body: msgspec.Struct | dict[str, Any], before: bytes = b"") -> bytes:
    """`before` are lines that go before the data: marks for a router, or the event's name."""
    return b"%bdata: %b\n\n" % (before, encode(body))


class TextEvent:
    """Events that differ in one string alone, encoded but for that: most of a stream."""

    __slots__ = ("_after", "_before")

    def __init__(self, body: msgspec.Struct) -> None:
        """`body` has HOLE where the string goes, and nowhere else."""
        self._before, self._after = event(body).split(encode(HOLE))

    def of(self, text: str, before: bytes = b"") -> bytes:
        """The same as `event`, for a body that has `text` there."""
        return b"%b%b%b%b" % (before, self._before, encode(text), self._after)


async def stream(
    request: web.Request,
    events: AsyncIterator[bytes],
    headers: Callable[[], Mapping[str, str]],
    *,
    done: bytes = DONE,
) -> web.StreamResponse:
    """Send `events` as they come, and `done` if none was missing; `headers` is asked when the first
    one is there."""
    first = await anext(events, b"")  # none, if only the end of a broken stream was missing
    response = web.StreamResponse(headers={**STREAM_HEADERS, **headers()})
    await response.prepare(request)
    await response.write(first)
    last = done
    try:
        async for chunk in events:
            await response.write(chunk)
    except ApiError as error:
        last = event(error.body)
    except ConnectionError:
        return response  # the client has gone
    except Exception:
        log.exception("a stream failed")
        last = event(InternalError("Internal error").body)
    await response.write(last)
    await response.write_eof()
    return response
