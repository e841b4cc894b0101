"""JSON responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from mla_router.worker.server.errors import ApiError

encode = msgspec.json.Encoder().encode


def json_response(
    body: msgspec.Struct | dict[str, Any] | list[Any],
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    return web.Response(
        body=encode(body), status=status, headers=headers, content_type="application/json"
    )


def error_response(error: ApiError) -> web.Response:
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return json_response(error.body, status=error.status, headers=headers)
