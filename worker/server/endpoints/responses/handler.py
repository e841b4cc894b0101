"""POST /v1/responses."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from aiohttp import web

from mla_router.worker.generation import FinishReason
from mla_router.worker.server.endpoints.chat.choice import ChatChoice
from mla_router.worker.server.endpoints.chat.prepare import FieldNames, PreparedChat, prepare
from mla_router.worker.server.endpoints.chat.prompt import check_count, in_thread_if_many
from mla_router.worker.server.endpoints.event_writer import Event, EventWriter
from mla_router.worker.server.endpoints.responses.builder import ResponseBuilder
from mla_router.worker.server.endpoints.responses.request import as_chat, wants_logprobs
from mla_router.worker.server.endpoints.responses.schema import (
    IncompleteDetails,
    Response,
    ResponseUsage,
)
from mla_router.worker.server.endpoints.responses.text_logprobs import TextLogprobs
from mla_router.worker.server.http.json_response import json_response
from mla_router.worker.server.http.parsed_body import read_parsed
from mla_router.worker.server.http.sse import stream
from mla_router.worker.server.request_names import trace_of
from mla_router.worker.server.requests.choice import Output
from mla_router.worker.server.requests.replay import read_replay
from mla_router.worker.server.schema.responses import (
    ResponsesRequest,
    TextFormat,
    TextSettings,
)
from mla_router.worker.server.state import STATE
from mla_router.worker.server.text.tool_calls.parts import Content

_decoder = msgspec.json.Decoder(ResponsesRequest)

FIELD_NAMES = FieldNames(
    messages="input",
    max_tokens="max_output_tokens",
    tool="tools[{}].name",
    tool_schema="tools[{}].parameters",
    format="text.format",
    schema="text.format.schema",
)


async def responses(request: web.Request) -> web.StreamResponse:
    service = request.app[STATE].accepting()
    body = await read_parsed(request, _decoder)
    model = service.check_model(body.model)
    streams, with_logprobs = bool(body.stream), wants_logprobs(body)
    # The last events repeat all logprobs. Another worker does not have those of the first tokens.
    replay = read_replay(request, body.continuation, possible=streams and not with_logprobs)
    items = len(body.input) if isinstance(body.input, list) else 1
    check_count(items, service.limits.context_length, "input")
    chat = await in_thread_if_many(
        lambda: as_chat(body, takes_images=service.media is not None), count=items
    )
    trace = trace_of(request.headers, body.request_id)
    each = streams or with_logprobs
    prepared = await prepare(service, chat, replay, FIELD_NAMES, trace=trace, token_by_token=each)
    answer = _Answer.of(prepared, body, model)
    async with prepared.handler.running():
        if body.stream:
            # OpenAI's streams of this endpoint end without [DONE].
            return await stream(
                request, answer.events(), lambda: prepared.handler.headers, done=b""
            )
        while outputs := await prepared.handler.next():
            for output in outputs:
                answer.take(output)
        return json_response(await answer.response(), headers=prepared.handler.headers)


@dataclass(slots=True)
class _Answer:
    prepared: PreparedChat
    choice: ChatChoice
    builder: ResponseBuilder
    logprobs: TextLogprobs | None
    begun: Response  # the response before the first output
    reason: str = ""  # a FinishReason value at the end

    @classmethod
    def of(cls, prepared: PreparedChat, body: ResponsesRequest, model: str) -> _Answer:
        choice = ChatChoice(prepared, 0)
        logprobs = TextLogprobs() if wants_logprobs(body) else None
        return cls(
            prepared, choice, ResponseBuilder(choice), logprobs, _begun(prepared, body, model)
        )

    def take(self, output: Output) -> list[Event]:
        """Takes `output` and returns its events."""
        events: list[Event] = []
        parts = self.choice.take(output)
        if self.logprobs is not None and (logprobs := self.choice.take_logprobs()):
            self.logprobs.add(output.text, logprobs.content)
        for part in parts:
            tokens = []
            if self.logprobs is not None and isinstance(part, Content):
                tokens = self.logprobs.take(part.text, self.choice.held)
            events += self.builder.add(part, tokens)
        if output.finish is not None:
            self.reason = output.finish.reason
            stopped = self.reason == FinishReason.STOP.value
            events += self.builder.close("completed" if stopped else "incomplete")
        return events

    async def response(self) -> Response:
        """Returns the complete response."""
        handler = self.prepared.handler
        stopped = self.reason == FinishReason.STOP.value
        reached = self.reason == FinishReason.LENGTH.value
        details = IncompleteDetails("max_output_tokens" if reached else None)
        return msgspec.structs.replace(
            self.begun,
            status="completed" if stopped else "incomplete",
            completed_at=int(time.time()) if stopped else None,
            incomplete_details=None if stopped else details,
            output=self.builder.items,
            usage=ResponseUsage.of(handler.usage, await self.choice.reasoning_tokens()),
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the events of the stream. A continued stream starts after the last event that the client has."""
        handler = self.prepared.handler
        writer = EventWriter(handler, self.take, numbered=True)
        due = writer.write(
            {"type": f"response.{kind}", "response": self.begun}
            for kind in ("created", "in_progress")
        )
        due += await writer.resume()
        # No event is sent before the first output, so that until then another worker can answer.
        while outputs := await handler.next():
            due += writer.write_outputs(outputs)
            if due:
                yield due
                due = b""
        response = await self.response()
        yield due + writer.write([{"type": f"response.{response.status}", "response": response}])


def _begun(prepared: PreparedChat, body: ResponsesRequest, model: str) -> Response:
    origin, params = prepared.handler.origin, prepared.handler.sampling.params
    return Response(
        id=prepared.handler.identity.answer_id("resp_"),
        created_at=origin.created,
        status="in_progress",
        model=model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=prepared.tools.several,
        temperature=params.temperature,
        text=TextSettings((body.text and body.text.format) or TextFormat(), verbosity="medium"),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_p=params.top_p,
        top_logprobs=body.top_logprobs or 0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )
