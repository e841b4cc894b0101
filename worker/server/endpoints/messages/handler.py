"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from mla_router.worker.generation import FinishReason
from mla_router.worker.server.endpoints.chat.choice import ChatChoice
from mla_router.worker.server.endpoints.chat.media import prompt_tokens
from mla_router.worker.server.endpoints.chat.prepare import PreparedChat, prepare
from mla_router.worker.server.endpoints.chat.prompt import check_count, in_thread_if_many
from mla_router.worker.server.endpoints.chat.tools import read_tools
from mla_router.worker.server.endpoints.event_writer import Event, EventWriter
from mla_router.worker.server.endpoints.messages.builder import MessageBuilder
from mla_router.worker.server.endpoints.messages.request import FIELD_NAMES, as_chat, count_parts
from mla_router.worker.server.endpoints.messages.schema import (
    Message,
    MessagesError,
    MessageUsage,
    TokenCount,
    ToolUseBlock,
)
from mla_router.worker.server.errors import ErrorBody, MissingField
from mla_router.worker.server.http.json_response import json_response
from mla_router.worker.server.http.parsed_body import read_parsed
from mla_router.worker.server.http.sse import event, stream
from mla_router.worker.server.request_names import trace_of
from mla_router.worker.server.requests.choice import Finish, Output
from mla_router.worker.server.requests.replay import read_replay
from mla_router.worker.server.schema.chat import ChatRequest
from mla_router.worker.server.schema.messages import MessagesRequest
from mla_router.worker.server.state import STATE, Service

_decoder = msgspec.json.Decoder(MessagesRequest)


async def messages(request: web.Request) -> web.StreamResponse:
    service = request.app[STATE].accepting()
    body = await read_parsed(request, _decoder)
    model = service.check_model(body.model)
    if body.max_tokens is None:
        raise MissingField("max_tokens")
    replay = read_replay(request, body.continuation, possible=bool(body.stream))
    chat = await _chat(service, body)
    trace = trace_of(request.headers, body.request_id)
    prepared = await prepare(
        service, chat, replay, FIELD_NAMES, trace=trace, token_by_token=bool(body.stream)
    )
    answer = _Answer(prepared, model)
    async with prepared.handler.running():
        if body.stream:
            return await stream(
                request,
                answer.events(),
                lambda: prepared.handler.headers,
                done=b"",
                failed=_error_event,
            )
        while outputs := await prepared.handler.next():
            for output in outputs:
                answer.take(output)
        return json_response(answer.message(), headers=prepared.handler.headers)


async def count_tokens(request: web.Request) -> web.Response:
    """Returns the number of prompt tokens that /v1/messages would compute for the same body."""
    service = request.app[STATE].ready()
    body = await read_parsed(request, _decoder)
    service.check_model(body.model)
    chat = await _chat(service, body)
    tools = read_tools(chat, FIELD_NAMES.tool)
    prompt = await prompt_tokens(service, chat, tools, FIELD_NAMES.messages)
    return json_response(TokenCount(len(prompt)))


async def _chat(service: Service, body: MessagesRequest) -> ChatRequest:
    parts = check_count(count_parts(body), service.limits.context_length, "messages")
    return await in_thread_if_many(
        lambda: as_chat(body, takes_images=service.media is not None), count=parts
    )


def _error_event(body: ErrorBody) -> bytes:
    return event(MessagesError(body.error), b"event: error\n")


class _Answer:
    def __init__(self, prepared: PreparedChat, model: str) -> None:
        self._prepared = prepared
        self._model = model
        self._choice = ChatChoice(prepared, 0)
        self._builder = MessageBuilder(self._choice)
        self._finish = Finish("")

    def take(self, output: Output) -> list[Event]:
        """Takes `output` and returns its events."""
        events: list[Event] = []
        for part in self._choice.take(output):
            events += self._builder.add(part)
        if output.finish is not None:
            self._finish = output.finish
            events += self._builder.close()
        return events

    def message(self) -> Message:
        """Returns the complete message. All outputs have been taken."""
        reason, sequence = self._stop()
        return msgspec.structs.replace(
            self._begun(),
            content=self._builder.blocks,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=MessageUsage.of(self._prepared.handler.usage),
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the events of the stream. A continued stream starts after the last event that the client has."""
        handler = self._prepared.handler
        writer = EventWriter(handler, self.take)
        # The first event has the number of cached tokens, which the first output brings. Nothing is sent before,
        # so that another worker can still answer.
        outputs = [] if handler.continues else await handler.next()
        due = writer.write([{"type": "message_start", "message": self._begun()}])
        # The end of the answer makes two more events: the client may have the first of them.
        due += await writer.resume(end_events=1)
        while outputs or (outputs := await handler.next()):
            due += writer.write_outputs(outputs)
            outputs = []
            if due:
                yield due
                due = b""
        yield due + writer.write(self._end())

    def _begun(self) -> Message:
        """Returns the message without blocks."""
        handler = self._prepared.handler
        usage = MessageUsage.of(handler.usage.of_prompt)
        return Message(id=handler.identity.answer_id("msg_"), model=self._model, usage=usage)

    def _end(self) -> list[Event]:
        message = self.message()
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        return [
            {"type": "message_delta", "delta": delta, "usage": message.usage},
            {"type": "message_stop"},
        ]

    def _stop(self) -> tuple[str | None, str | None]:
        """Returns stop_reason and stop_sequence."""
        reason, matched = self._finish.reason, self._finish.matched
        if reason == FinishReason.LENGTH.value:
            return "max_tokens", None
        if reason != FinishReason.STOP.value:
            return None, None  # an abort has no stop_reason
        if isinstance(matched, str):
            return "stop_sequence", matched
        is_call = any(isinstance(block, ToolUseBlock) for block in self._builder.blocks)
        return "tool_use" if is_call else "end_turn", None
