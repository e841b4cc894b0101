"""A conversation's answers as a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from mla_router.worker.server.chat.choice import ChatChoice
from mla_router.worker.server.chat.run import ChatRun
from mla_router.worker.server.chat.shapes import (
    CallPiece,
    Chunk,
    ChunkChoice,
    FunctionPiece,
    Piece,
)
from mla_router.worker.server.envelope import envelope
from mla_router.worker.server.sse import HOLE, TextEvent, event
from mla_router.worker.server.tool_calls.parts import Arguments, Call, Content, Part, Reasoning
from mla_router.worker.server.usage import Usage


async def chunks(run: ChatRun, model: str, *, usage: bool) -> AsyncIterator[bytes]:
    """The events. `usage`: the counts come as the last one."""
    generation = run.generation
    shared = envelope(generation, "chatcmpl", model)
    no_usage = None if usage else msgspec.UNSET  # chunks before the last say null, if any says it
    choices = [ChatChoice(run, index) for index in range(generation.size)]
    begun = set(generation.known)
    for output in generation.resumed:
        choices[output.index].skip(output)
    marks = generation.marks()

    def chunk(
        choices: list[ChunkChoice],
        usage: Usage | msgspec.UnsetType | None,
        marks: bytes = b"",
    ) -> bytes:
        return event(Chunk(**shared, choices=choices, usage=usage), marks)

    def send(
        choice: ChatChoice, piece: Piece, reason: str | None = None, listed: str | None = None
    ) -> bytes:
        index = choice.index
        piece.role = "" if index in begun else "assistant"
        begun.add(index)
        scores = choice.take_logprobs() if choice.tokens.token_ids else None
        mark = marks.take(index, listed)
        return chunk([ChunkChoice(index, piece, scores, reason)], no_usage, mark)

    plain = [
        TextEvent(
            Chunk(**shared, choices=[ChunkChoice(index, Piece(content=HOLE))], usage=no_usage)
        )
        for index in range(generation.size)
    ]
    outputs = await generation.next()
    # The first event is there before it is known what the first token shows; a client for whom we go
    # on has had it. The other choices begin with their first piece.
    events = [] if generation.continues else [send(choices[0], Piece(content=""))]
    begun.add(0)
    while outputs:
        for output in outputs:
            choice = choices[output.index]
            parts = choice.take(output)
            marks.add(output.index, output.token_ids)
            text = parts[0].text if len(parts) == 1 and isinstance(parts[0], Content) else ""
            if text and choice.index in begun and not choice.tokens.token_ids:
                events.append(plain[choice.index].of(text, marks.take(choice.index)))
            elif parts:  # in one event: it stands for all of the output's tokens
                events.append(send(choice, fill(choice, Piece(), parts)))
            if output.finish:
                reason = choice.reason_of(output)
                events.append(send(choice, Piece(), reason, output.finish.reason))
        if events:
            yield b"".join(events)  # in one write, however far the client is behind
            events.clear()
        outputs = await generation.next()
    if usage:
        yield chunk([], generation.usage)


def fill(choice: ChatChoice, piece: Piece, parts: list[Part]) -> Piece:
    """Put `parts` into `piece`: one entry a call that they are about."""
    for part in parts:
        if isinstance(part, Reasoning):
            piece.reasoning_content = (piece.reasoning_content or "") + part.text
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
