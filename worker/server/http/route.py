"""One path that a worker answers."""

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
    body: Any = None  # type of the request's body; None: it has none
    answer: Any = dict[str, Any]  # type of the answer's body, if it is JSON
    chunk: Any = None  # type of a streamed answer's events, if it can be streamed
    needs_key: bool = True
    for_admins: bool = False  # changes the worker for everybody: the admin's key, if there is one


ROUTED = web.AppKey("routed", tuple[Route, ...])  # all of them
