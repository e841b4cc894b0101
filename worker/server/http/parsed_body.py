"""Reads a body as its type, and logs the unknown fields that clients send."""

from __future__ import annotations

import logging

import msgspec
from aiohttp import web

from mla_router.worker.server.http.body import read_body
from mla_router.worker.server.schema.parse import Request, parse

log = logging.getLogger(__name__)

MAX_LOGGED = 100  # names; a client can make up any number
MAX_LENGTH = 64  # of a name in the log


class IgnoredFields:
    """Logs each unknown field once. An operator sees which settings of the clients have no effect."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def add(self, names: list[str], path: str) -> None:
        for name in names:
            shown = ascii(name[:MAX_LENGTH])
            if shown not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(shown)
                log.info("unknown field %s of %s is ignored; logged once", shown, path)


IGNORED_FIELDS = web.AppKey("ignored_fields", IgnoredFields)


async def read_parsed(
    request: web.Request, decoder: msgspec.json.Decoder[Request], *, empty: bytes = b""
) -> Request:
    """Reads and parses a body; `empty` takes the place of an empty one. Raises the errors of `read_body` and `parse`."""
    parsed, ignored = parse(await read_body(request) or empty, decoder)
    if ignored:
        request.app[IGNORED_FIELDS].add(ignored, request.path)
    return parsed
