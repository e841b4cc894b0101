"""POST /v1/chat/completions."""

from __future__ import annotations

import msgspec
from aiohttp import web

from mla_router.worker.server.endpoints.chat.prepare import prepare
from mla_router.worker.server.endpoints.chat.response import completion
from mla_router.worker.server.endpoints.chat.stream import chunks
from mla_router.worker.server.http.json_response import json_response
from mla_router.worker.server.http.parsed_body import read_parsed
from mla_router.worker.server.http.sse import stream
from mla_router.worker.server.request_names import trace_of
from mla_router.worker.server.requests.replay import read_replay
from mla_router.worker.server.schema.chat import ChatRequest
from mla_router.worker.server.state import STATE
from mla_router.worker.server.validation.defaults import fill_in

_decoder = msgspec.json.Decoder(ChatRequest)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    service = request.app[STATE].accepting()
    body = await read_parsed(request, _decoder)
    model = service.check_model(body.model)
    fill_in(body, service.config)
    replay = read_replay(request, body.continuation, possible=bool(body.stream))
    trace = trace_of(request.headers, body.request_id)
    prepared = await prepare(service, body, replay, trace=trace)
    handler = prepared.handler
    async with handler.running():
        if body.stream:
            events = chunks(prepared, model, body)
            return await stream(request, events, lambda: handler.headers)
        return json_response(await completion(prepared, model), headers=handler.headers)
