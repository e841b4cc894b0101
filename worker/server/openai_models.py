"""GET /v1/models: the one model that a worker serves."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from mla_router.worker.server.responses import json_response
from mla_router.worker.server.state import STATE, ServerState


async def models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_model(request.app[STATE])]})


async def model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    state.ready().check_model(request.match_info["model"])
    return json_response(_model(state))


def _model(state: ServerState) -> dict[str, Any]:
    name = state.config.model_name
    return {
        "id": name,
        "object": "model",
        "created": state.birth.created,
        "owned_by": "mla-router",
        "root": name,
        "parent": None,
        "max_model_len": state.ready().limits.context_length,
    }
