"""GET /openapi.json: an OpenAPI 3.2 document of the routes, made from the types of their bodies.

The types do not contain limits that depend on the model or on other fields. So a body that fits the document may still
get a 400.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from mla_router.worker.server.endpoints.info import package_version
from mla_router.worker.server.errors import ErrorBody
from mla_router.worker.server.http.json_response import json_response
from mla_router.worker.server.http.route import ROUTED, Route

REFERENCE = "#/components/schemas/{name}"
_PATTERN = re.compile(r"\{(\w+):[^}]+\}")  # a parameter with its pattern, in aiohttp's syntax


async def openapi(request: web.Request) -> web.Response:
    routes = request.app[ROUTED]
    return json_response(document(routes))


def document(routes: Sequence[Route]) -> dict[str, Any]:
    types = list({route.body: None for route in routes if route.body is not None})
    types += list({t: None for route in routes for t in (route.answer, route.chunk) if t})
    schemas, components = msgspec.json.schema_components(
        [*types, ErrorBody], ref_template=REFERENCE
    )
    of_type = dict(zip([*types, ErrorBody], schemas, strict=True))
    for component in components.values():
        _leave_out_refused(component)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PATTERN.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, of_type)
    return {
        "openapi": "3.2.0",
        "info": {"title": "mla-router worker", "version": package_version()},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, path: str, of_type: dict[Any, Any]) -> dict[str, Any]:
    kind = "text/plain" if route.answer is str else "application/json"
    content = {kind: {"schema": of_type[route.answer]}}
    if route.chunk is not None:
        event = _event(of_type[route.chunk], of_type[ErrorBody])
        content["text/event-stream"] = {"itemSchema": event}
    error = {"application/json": {"schema": of_type[ErrorBody]}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "Why there is none.", "content": error},
        },
        "security": [{"key": []}] if route.needs_key else [],
    }
    if names := re.findall(r"\{(\w+)\}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if route.body is not None:
        body = {"application/json": {"schema": of_type[route.body]}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _event(chunk: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a server-sent event: a chunk, an error, or the end."""
    data = [
        {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
        for schema in (chunk, error)
    ]
    data.append({"const": "[DONE]"})
    return {"type": "object", "properties": {"data": {"anyOf": data}}, "required": ["data"]}


def _leave_out_refused(component: dict[str, Any]) -> None:
    """Removes the fields without a type: the server reads them only to refuse them (`schema/unsupported.py`)."""
    properties = component.get("properties", {})
    for name in [name for name in properties if set(properties[name]) <= {"default"}]:
        del properties[name]
