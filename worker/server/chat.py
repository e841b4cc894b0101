"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from mla_router.worker.server.body import read_body
from mla_router.worker.server.envelope import envelope
from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.generation import Generation, Output
from mla_router.worker.server.logprobs import ChatLogprobs, chat_logprobs
from mla_router.worker.server.prompts import check_ids
from mla_router.worker.server.replay import read_replay
from mla_router.worker.server.responses import json_response
from mla_router.worker.server.sampling import check_sampling
from mla_router.worker.server.schema.chat import ChatMessage, ChatRequest
from mla_router.worker.server.schema.parse import parse
from mla_router.worker.server.schema.unsupported import refuse_unsupported
from mla_router.worker.server.scored_tokens import ScoredTokens
from mla_router.worker.server.sse import event, stream
from mla_router.worker.server.state import STATE
from mla_router.worker.server.usage import Usage

_decoder = msgspec.json.Decoder(ChatRequest)

MAX_TOP_LOGPROBS = 20  # OpenAI's

# OpenAI's newer name for system; templates know only the older.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None
    annotations: list[str] = []


class Choice(msgspec.Struct, frozen=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """The delta of a chunk; what is empty is left out."""

    role: str = ""
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Piece
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None
    system_fingerprint: str


async def chat_completions(request: web.Request) -> web.StreamResponse:
    service = request.app[STATE].accepting()
    body = parse(await read_body(request), _decoder)
    model = service.check_model(body.model)
    refuse_unsupported(body)
    named = body.max_completion_tokens is not None
    sampling = check_sampling(
        body,
        max_tokens=body.max_completion_tokens if named else body.max_tokens,
        max_tokens_field="max_completion_tokens" if named else "max_tokens",
        min_tokens=body.min_tokens,
        seed=body.seed,
        logprobs=bool(body.logprobs),
        top_logprobs=_top_logprobs(body),
        vocab_size=service.limits.vocab_size,
    )
    replay = read_replay(request.headers, body.continuation, possible=bool(body.stream))
    prompt = await service.tokenizer.encode_chat(
        _for_template(body.messages), context_length=service.limits.context_length
    )
    check_ids(prompt, service.limits.vocab_size, "messages")
    generation = Generation(
        service,
        [prompt],
        sampling,
        cache_salt=body.cache_salt,
        replay=replay,
        priority=body.priority,
    )
    async with generation.running():
        if body.stream:
            events = _events(generation, model, body.wants_usage)
            return await stream(request, events, lambda: generation.headers)
        return await _whole(generation, model)


@dataclass(slots=True)
class _Part:
    """What of one choice has not been sent yet."""

    text: list[str] = field(default_factory=list)
    tokens: ScoredTokens = field(default_factory=ScoredTokens)
    finish_reason: str | None = None
    begun: bool = False  # the client knows of this choice

    def add(self, output: Output) -> None:
        self.text.append(output.text)
        self.tokens.add(output)
        self.finish_reason = output.finish.reason if output.finish else None

    def scores(self, generation: Generation) -> ChatLogprobs | None:
        """Those of the tokens so far; begin anew."""
        tokens, self.tokens = self.tokens, ScoredTokens()
        if not generation.sampling.params.logprobs:
            return None
        return chat_logprobs(generation.service.tokenizer, tokens)


async def _whole(generation: Generation, model: str) -> web.Response:
    parts = [_Part() for _ in range(generation.size)]
    while outputs := await generation.next():
        for output in outputs:
            parts[output.index].add(output)
    choices = [
        Choice(
            index,
            Message(content="".join(part.text)),
            part.scores(generation),
            part.finish_reason or "",
        )
        for index, part in enumerate(parts)
    ]
    completion = Completion(
        **envelope(generation, "chatcmpl", model),
        choices=choices,
        usage=generation.usage,
    )
    return json_response(completion, headers=generation.headers)


async def _events(generation: Generation, model: str, usage: bool) -> AsyncIterator[bytes]:
    shared = envelope(generation, "chatcmpl", model)
    no_usage = None if usage else msgspec.UNSET  # chunks before the last say null, if any says it
    parts = [_Part() for _ in range(generation.size)]
    for index in generation.known:
        parts[index].begun = True
    marks = generation.marks()

    def chunk(
        choices: list[ChunkChoice],
        usage: Usage | msgspec.UnsetType | None,
        marks: bytes = b"",
    ) -> bytes:
        return event(Chunk(**shared, choices=choices, usage=usage), marks)

    def piece(index: int, content: str | None = None, finish_reason: str | None = None) -> bytes:
        part = parts[index]
        delta = Piece("" if part.begun else "assistant", content)
        part.begun = True
        scores = part.scores(generation) if part.tokens.token_ids else None
        choice = ChunkChoice(index, delta, scores, finish_reason)
        return chunk([choice], no_usage, marks.take(index, finish_reason))

    outputs = await generation.next()
    # The first event is there before it is known what the first token shows. A client that goes on
    # has had it. The other choices begin with their first piece.
    events = [] if generation.continues else [piece(0, "")]
    parts[0].begun = True
    while outputs:
        for output in outputs:
            part = parts[output.index]
            part.tokens.add(output)
            marks.add(output.index, output.token_ids)
            if output.text:
                events.append(piece(output.index, output.text))
            if output.finish:
                events.append(piece(output.index, finish_reason=output.finish.reason))
        if events:
            yield b"".join(events)  # in one write, however far the client is behind
            events.clear()
        outputs = await generation.next()
    if usage:
        yield chunk([], generation.usage)


def _top_logprobs(body: ChatRequest) -> int:
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs: must be between 0 and {MAX_TOP_LOGPROBS}", param="top_logprobs"
        )
    if top and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs: true", param="top_logprobs")
    return top


def _for_template(messages: list[ChatMessage] | None) -> list[dict[str, str]]:
    if not messages:
        raise InvalidRequest("messages: give at least one message", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> dict[str, str]:
    refuse_unsupported(message, where + ".")
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(f"{where}.role: one of {', '.join(ROLES)}", param=where + ".role")
    if message.content is None:
        raise InvalidRequest(f"{where}.content: must not be null", param=where + ".content")
    if isinstance(message.content, str):
        content = message.content
    else:
        texts = []
        for index, part in enumerate(message.content):
            if part.type != "text" or part.text is None:
                raise InvalidRequest(
                    f"{where}.content[{index}]: this model takes only parts of type text",
                    param=f"{where}.content[{index}].type",
                )
            texts.append(part.text)
        content = "\n".join(texts)
    rendered = {"role": role, "content": content}
    return rendered if message.name is None else {**rendered, "name": message.name}
