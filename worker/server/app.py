"""The HTTP application: its routes and its middlewares."""

from __future__ import annotations

import logging
import time
import uuid

from aiohttp import web

from mla_router.worker.server.errors import (
    ApiError,
    InternalError,
    UnsupportedMediaType,
    of_status,
)
from mla_router.worker.server.http.access import check_access
from mla_router.worker.server.http.json_response import error_response, json_response
from mla_router.worker.server.http.parsed_body import IGNORED_FIELDS, IgnoredFields
from mla_router.worker.server.http.protocol import continue_upload
from mla_router.worker.server.http.route import ROUTED, Handler
from mla_router.worker.server.http.turns import TURNS, Turns
from mla_router.worker.server.request_names import trace_of
from mla_router.worker.server.routes import ROUTES
from mla_router.worker.server.state import STATE, ServerState

log = logging.getLogger(__name__)

# Load balancers probe these paths without a key.
OPEN_PATHS = frozenset(route.path for route in ROUTES if not route.needs_key)
ADMIN_PATHS = frozenset(route.path for route in ROUTES if route.for_admins)
REQUEST_ID = web.RequestKey("request_id", str)
MAX_PATH = 200  # characters of a path in the log and in errors
CLIENT_CLOSED_REQUEST = 499  # nginx's status; the router logs the same


def make_app(state: ServerState) -> web.Application:
    app = web.Application(
        middlewares=[
            *([request_log] if state.config.log_requests else []),
            errors,
            authentication,
            content_type,
        ],
        client_max_size=state.config.max_payload_size,
    )
    app[STATE] = state
    app[TURNS] = Turns()
    app[ROUTED] = ROUTES
    app[IGNORED_FIELDS] = IgnoredFields()
    app.on_response_prepare.append(_add_headers)
    for route in ROUTES:
        # RFC 9110 9.1: HEAD wherever there is GET. Some monitors ask for /health with it.
        for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
            app.router.add_route(method, route.path, route.handler, expect_handler=continue_upload)
    return app


@web.middleware
async def request_log(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Logs a line for each POST at its end. The outermost middleware: it sees the status of errors."""
    if request.method != "POST":
        return await handler(request)
    begun, status = time.monotonic(), CLIENT_CLOSED_REQUEST
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        seconds = time.monotonic() - begun
        # Still percent-encoded: it cannot break the line
        path = request.rel_url.raw_path[:MAX_PATH]
        log.info("request %s %s %d %.3f s", request.get(REQUEST_ID, "-"), path, status, seconds)


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Converts every failure into OpenAI's error shape."""
    request[REQUEST_ID] = _request_id(request)
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPException as error:
        kept = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        reason = error.reason
        if error.status == 404:
            reason = f"unknown path: {request.rel_url.raw_path[:MAX_PATH]}"
        elif kept:
            reason = f"this path takes {kept['Allow']}, not {request.method[:20]}"
        return json_response(of_status(error.status, reason), status=error.status, headers=kept)
    except ConnectionError:
        # The client left during its upload. Only the access log sees this status.
        return web.Response(status=CLIENT_CLOSED_REQUEST)
    except Exception:
        log.exception("request %s failed", request[REQUEST_ID])
        return error_response(InternalError(f"Internal error; request {request[REQUEST_ID]}"))


@web.middleware
async def authentication(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Denies by default. It checks the matched route, not the text of the URL."""
    resource = request.match_info.route.resource
    path = "" if resource is None else resource.canonical
    if path not in OPEN_PATHS:
        check_access(request.app[STATE].config, request, for_admins=path in ADMIN_PATHS)
    return await handler(request)


@web.middleware
async def content_type(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses bodies that are not JSON: foreign web pages can post plain text from a browser, but not JSON."""
    if request.can_read_body and "Content-Type" in request.headers:
        kind = request.content_type
        if kind != "application/json" and not kind.endswith("+json"):
            raise UnsupportedMediaType("Send the body with Content-Type: application/json")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("Send the body without Content-Encoding")
    return await handler(request)


def _request_id(request: web.Request) -> str:
    """Returns the client's id if it is safe in logs and headers, else a new one."""
    return trace_of(request.headers) or uuid.uuid4().hex


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "mla-router"  # instead of the library's list of versions
    state = request.app[STATE]
    response.headers["x-mla-worker"] = state.config.name
    if (reading := state.reading()) is not None:
        # From this number a router learns the load that other routers put on this worker.
        response.headers["x-mla-requests"] = str(reading.stats.running + reading.stats.waiting)
    if REQUEST_ID in request:
        response.headers["x-request-id"] = request[REQUEST_ID]
