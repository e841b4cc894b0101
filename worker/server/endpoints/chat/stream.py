"""The stream of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from mla_router.worker.server.endpoints.chat.choice import ChatChoice, usage_of
from mla_router.worker.server.endpoints.chat.prepare import PreparedChat
from mla_router.worker.server.endpoints.chat.schema import (
    CallPiece,
    Chunk,
    ChunkChoice,
    FunctionPiece,
    Piece,
)
from mla_router.worker.server.http.sse import PLACEHOLDER, TextEvent, event
from mla_router.worker.server.requests.choice import Finish
from mla_router.worker.server.requests.usage import Usage
from mla_router.worker.server.schema.chat import ChatRequest
from mla_router.worker.server.text.tool_calls.parts import Arguments, Call, Content, Part, Reasoning


async def chunks(prepared: PreparedChat, model: str, body: ChatRequest) -> AsyncIterator[bytes]:
    """Yields the events of a streamed answer to `body`."""
    handler = prepared.handler
    choices = [ChatChoice(prepared, index) for index in range(handler.size)]
    for output in handler.resumed:
        choices[output.index].skip(output)
    writer = ChunkWriter(prepared, model, body)
    outputs = await handler.next()
    # The first event has only the role and is sent with the first token. The client of a continued stream has it
    # already. The other choices begin with their first piece.
    events = [] if handler.continues else [writer.role(choices[0])]
    writer.begun.add(0)
    while outputs:
        for output in outputs:
            choice = choices[output.index]
            parts = choice.take(output)
            writer.marks.add(output.index, output.token_ids)
            text = parts[0].text if len(parts) == 1 and isinstance(parts[0], Content) else ""
            if text and writer.may_be_plain(choice):
                events.append(writer.plain(choice, text))
            elif parts:  # one event, because its mark lists all tokens of the output
                events.append(writer.event(choice, fill(choice, Piece(), parts)))
            if output.finish:
                events.append(writer.event(choice, Piece(), output.finish))
        if events:
            yield b"".join(events)  # one write, even if the client is far behind
            events.clear()
        outputs = await handler.next()
    if body.wants_usage:
        yield writer.usage(await usage_of(prepared, choices))


class ChunkWriter:
    """Writes the events of one stream."""

    def __init__(self, prepared: PreparedChat, model: str, body: ChatRequest) -> None:
        handler = prepared.handler
        self.marks = handler.marks()
        self.begun = set(handler.known)  # choices whose first event the client has
        self._prepared = prepared
        self._shared = handler.identity.envelope("chatcmpl-", model)
        self._counted = body.wants_continuous_usage
        # If the stream has usage at all, the earlier chunks have null.
        self._no_usage = None if body.wants_usage else msgspec.UNSET
        # The very first event has the prompt's ids.
        has_ids = prepared.details.token_ids and not handler.continues
        self._prompt_ids = handler.prompts[0] if has_ids else msgspec.UNSET
        self._plain = [
            TextEvent(Chunk(**self._shared, choices=[choice], usage=self._no_usage))
            for choice in (
                ChunkChoice(index, Piece(content=PLACEHOLDER)) for index in range(handler.size)
            )
        ]

    def role(self, choice: ChatChoice) -> bytes:
        """Returns the event that has only the role."""
        usage = self._usage(choice)
        if isinstance(usage, Usage):
            usage = usage.of_prompt
        return self._event(choice, Piece(content=""), None, usage)

    def event(self, choice: ChatChoice, piece: Piece, finish: Finish | None = None) -> bytes:
        """Returns the next event of `choice`."""
        return self._event(choice, piece, finish, self._usage(choice))

    def may_be_plain(self, choice: ChatChoice) -> bool:
        """Whether an event of `choice` with some text has nothing else."""
        return choice.index in self.begun and not choice.has_details and not self._counted

    def plain(self, choice: ChatChoice, text: str) -> bytes:
        """Returns an event with text alone, from a template."""
        return self._plain[choice.index].of(text, self.marks.take(choice.index))

    def usage(self, usage: Usage) -> bytes:
        """Returns the last event of a stream with usage."""
        timing = self._prepared.handler.timing
        return event(Chunk(**self._shared, choices=[], usage=usage, metrics=timing))

    def _usage(self, choice: ChatChoice) -> Usage | msgspec.UnsetType | None:
        return self._prepared.handler.usage_of(choice.index) if self._counted else self._no_usage

    def _event(
        self,
        choice: ChatChoice,
        piece: Piece,
        finish: Finish | None,
        usage: Usage | msgspec.UnsetType | None,
    ) -> bytes:
        index, ending = choice.index, finish or Finish("")
        piece.role = msgspec.UNSET if index in self.begun else "assistant"
        self.begun.add(index)
        shown = ChunkChoice(
            index,
            piece,
            choice.take_logprobs() if choice.has_details else None,
            choice.reason_of(finish),
            ending.matched,
            ending.stop_reason,
            choice.take_token_ids() if self._prepared.details.token_ids else msgspec.UNSET,
        )
        prompt_ids, self._prompt_ids = self._prompt_ids, msgspec.UNSET
        chunk = Chunk(**self._shared, choices=[shown], usage=usage, prompt_token_ids=prompt_ids)
        return event(chunk, self.marks.take(index, ending.reason or None))


def fill(choice: ChatChoice, piece: Piece, parts: list[Part]) -> Piece:
    """Puts `parts` into `piece`, with one entry for each call. Returns `piece`."""
    for part in parts:
        if isinstance(part, Reasoning):
            piece.reasoning = piece.reasoning_content = (piece.reasoning_content or "") + part.text
        elif isinstance(part, Content):
            piece.content = (piece.content or "") + part.text
        else:
            calls = piece.tool_calls = piece.tool_calls or []
            if isinstance(part, Call):
                index, call_id = choice.calls, choice.next_call_id()
                calls.append(CallPiece(index, FunctionPiece("", part.name), call_id, "function"))
            elif isinstance(part, Arguments):
                if not calls:
                    calls.append(CallPiece(choice.calls - 1, FunctionPiece("")))
                calls[-1].function.arguments += part.text
    return piece
