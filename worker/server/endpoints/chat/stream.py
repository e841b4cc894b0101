"""The stream of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from mla_router.worker.server.endpoints.chat.choice import ChatChoice, usage_of
from mla_router.worker.server.endpoints.chat.run import ChatRun
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


async def chunks(run: ChatRun, model: str, body: ChatRequest) -> AsyncIterator[bytes]:
    """Yields the events of a streamed answer to `body`."""
    handler = run.handler
    shared = handler.identity.envelope("chatcmpl-", model)
    counted = body.wants_continuous_usage
    # If the stream has usage at all, the earlier chunks have null.
    no_usage = None if body.wants_usage else msgspec.UNSET
    choices = [ChatChoice(run, index) for index in range(handler.size)]
    begun = set(handler.known)
    for output in handler.resumed:
        choices[output.index].skip(output)
    marks = handler.marks()
    prompt_ids = handler.prompts[0] if run.details.token_ids else msgspec.UNSET

    def send(
        choice: ChatChoice, piece: Piece, finish: Finish | None = None, *, is_role: bool = False
    ) -> bytes:
        """Returns the next event of `choice`. The very first one has the prompt's ids. `is_role`: it has only the
        role."""
        nonlocal prompt_ids
        index, ending = choice.index, finish or Finish("")
        usage = handler.usage_of(index) if counted else no_usage
        if is_role and isinstance(usage, Usage):
            usage = usage.of_prompt
        piece.role = msgspec.UNSET if index in begun else "assistant"
        begun.add(index)
        shown = ChunkChoice(
            index,
            piece,
            choice.take_logprobs() if choice.has_details else None,
            choice.reason_of(finish),
            ending.matched,
            ending.stop_reason,
            choice.take_token_ids() if run.details.token_ids else msgspec.UNSET,
        )
        told, prompt_ids = prompt_ids, msgspec.UNSET
        return event(
            Chunk(
                **shared,
                choices=[shown],
                usage=usage,
                prompt_token_ids=told,
            ),
            marks.take(index, ending.reason or None),
        )

    plain = [
        TextEvent(
            Chunk(
                **shared, choices=[ChunkChoice(index, Piece(content=PLACEHOLDER))], usage=no_usage
            )
        )
        for index in range(handler.size)
    ]
    outputs = await handler.next()
    # The first event has only the role and is sent with the first token. The client of a continued stream has it
    # already. The other choices begin with their first piece.
    events = []
    if handler.continues:
        prompt_ids = msgspec.UNSET
    else:
        events.append(send(choices[0], Piece(content=""), is_role=True))
    begun.add(0)
    while outputs:
        for output in outputs:
            choice = choices[output.index]
            parts = choice.take(output)
            marks.add(output.index, output.token_ids)
            text = parts[0].text if len(parts) == 1 and isinstance(parts[0], Content) else ""
            if text and choice.index in begun and not choice.has_details and not counted:
                events.append(plain[choice.index].of(text, marks.take(choice.index)))
            elif parts:  # one event, because its mark lists all tokens of the output
                events.append(send(choice, fill(choice, Piece(), parts)))
            if output.finish:
                events.append(send(choice, Piece(), output.finish))
        if events:
            yield b"".join(events)  # one write, even if the client is far behind
            events.clear()
        outputs = await handler.next()
    if body.wants_usage:
        usage = await usage_of(run, choices)
        yield event(Chunk(**shared, choices=[], usage=usage, metrics=handler.timing))


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
