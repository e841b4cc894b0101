"""The type of a route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    handler: Handler
    summary: str
    body: Any = None  # type of the request body; None: no body
    answer: Any = dict[str, Any]  # type of a JSON response
    chunk: Any = None  # type of the events of a stream; None: no streams
    needs_key: bool = True
    for_admins: bool = False  # needs the admin key, if one is configured


ROUTED = web.AppKey("routed", tuple[Route, ...])  # all of them
