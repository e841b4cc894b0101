"""Streams of server-sent events.

The status line goes out with the first event, so that an error before the first token has its own status. Later an
error is an event, and `[DONE]` never follows it: a client can tell a broken answer from a complete one.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from mla_router.worker.server.errors import ApiError, ErrorBody, InternalError
from mla_router.worker.server.http.json_response import encode

log = logging.getLogger(__name__)

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # or proxies such as nginx buffer the stream
}
DONE = b"data: [DONE]\n\n"
PLACEHOLDER = "\0"


def event(body: msgspec.Struct | dict[str, Any], before: bytes = b"") -> bytes:
    """Returns one event. `before` has the lines before the data: marks for a router, or the name of the event."""
    return b"%bdata: %b\n\n" % (before, encode(body))


class TextEvent:
    """Encodes events that differ only in one string. Most events of a stream do."""

    __slots__ = ("_after", "_before")

    def __init__(self, body: msgspec.Struct) -> None:
        """`body` has PLACEHOLDER in place of the string, and nowhere else."""
        self._before, self._after = event(body).split(encode(PLACEHOLDER))

    def of(self, text: str, before: bytes = b"") -> bytes:
        """Returns the event with `text` in place of PLACEHOLDER."""
        return b"%b%b%b%b" % (before, self._before, encode(text), self._after)


async def stream(
    request: web.Request,
    events: AsyncIterator[bytes],
    headers: Callable[[], Mapping[str, str]],
    *,
    done: bytes = DONE,
    failed: Callable[[ErrorBody], bytes] = event,
) -> web.StreamResponse:
    """Sends `events`, and `done` after a complete answer. `headers` is called when the first event exists. `failed`
    encodes the event of an error."""
    first = await anext(events, b"")  # empty if a broken stream lacked only its end
    response = web.StreamResponse(headers={**STREAM_HEADERS, **headers()})
    await response.prepare(request)
    await response.write(first)
    last = done
    try:
        async for chunk in events:
            await response.write(chunk)
    except ApiError as error:
        last = failed(error.body)
    except ConnectionError:
        return response  # the client has gone
    except Exception:
        log.exception("a stream failed")
        last = failed(InternalError("Internal error").body)
    await response.write(last)
    await response.write_eof()
    return response
