"""POST /v1/completions: text or token ids, one prompt or several."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from mla_router.worker.server.body import read_body
from mla_router.worker.server.envelope import envelope
from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.generation import Generation, Output
from mla_router.worker.server.logprobs import CompletionLogprobs, CompletionScorer
from mla_router.worker.server.prompts import read_prompts
from mla_router.worker.server.replay import read_replay
from mla_router.worker.server.responses import json_response
from mla_router.worker.server.sampling import check_sampling
from mla_router.worker.server.schema.completions import CompletionRequest
from mla_router.worker.server.schema.parse import parse
from mla_router.worker.server.schema.unsupported import refuse_unsupported
from mla_router.worker.server.scored_tokens import ScoredTokens
from mla_router.worker.server.sse import event, stream
from mla_router.worker.server.state import STATE
from mla_router.worker.server.usage import Usage

_decoder = msgspec.json.Decoder(CompletionRequest)

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class Choice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer, and each chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType | None
    system_fingerprint: str


@dataclass(slots=True)
class _Part:
    """What of one choice has not been sent yet."""

    scorer: CompletionScorer
    text: list[str] = field(default_factory=list)
    tokens: ScoredTokens = field(default_factory=ScoredTokens)
    finish_reason: str | None = None
    begun: bool = False

    def add(self, output: Output) -> None:
        self.text.append(output.text)
        self.tokens.add(output)
        self.finish_reason = output.finish.reason if output.finish else None

    def skip(self, output: Output, *, scored: bool) -> None:
        """Go on behind what the client has been given."""
        if scored:
            self.scorer.skip(output.shown_ids)
        self.begun = True

    def take(self, generation: Generation, index: int) -> Choice:
        """Everything so far as a choice; begin anew."""
        wanted = generation.sampling.params.logprobs
        scores = self.scorer.score(self.tokens) if wanted else None
        choice = Choice(index, "".join(self.text), scores, self.finish_reason)
        self.text, self.tokens, self.begun = [], ScoredTokens(), True
        return choice


async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[STATE].accepting()
    body = parse(await read_body(request), _decoder)
    model = service.check_model(body.model)
    refuse_unsupported(body)
    if body.logprobs not in (None, 0):
        raise InvalidRequest(
            "logprobs: only 0 (the sampled tokens alone) is supported yet",
            param="logprobs",
            code="unsupported_parameter",
        )
    sampling = check_sampling(
        body,
        max_tokens=body.max_tokens,
        max_tokens_field="max_tokens",
        seed=body.seed,
        logprobs=body.logprobs is not None,
        vocab_size=service.limits.vocab_size,
    )
    replay = read_replay(request.headers, body.continuation, possible=bool(body.stream))
    prompts = await read_prompts(service, body.prompt, "prompt")
    generation = Generation(
        service, prompts, sampling, DEFAULT_MAX_TOKENS, body.cache_salt, replay=replay
    )
    async with generation.running():
        if body.stream:
            events = _events(generation, model, body.wants_usage)
            return await stream(request, events, lambda: generation.headers)
        return await _whole(generation, model)


async def _whole(generation: Generation, model: str) -> web.Response:
    parts = _parts(generation)
    while outputs := await generation.next():
        for output in outputs:
            parts[output.index].add(output)
    choices = [part.take(generation, index) for index, part in enumerate(parts)]
    completion = Completion(
        **envelope(generation, "cmpl", model),
        choices=choices,
        usage=generation.usage,
    )
    return json_response(completion, headers=generation.headers)


async def _events(generation: Generation, model: str, usage: bool) -> AsyncIterator[bytes]:
    shared = envelope(generation, "cmpl", model)
    no_usage = None if usage else msgspec.UNSET  # chunks before the last say null, if any says it
    parts = _parts(generation)
    for output in generation.resumed:
        parts[output.index].skip(output, scored=generation.sampling.params.logprobs)
    marks = generation.marks()

    def chunk(
        choices: list[Choice], usage: Usage | msgspec.UnsetType | None, marks: bytes = b""
    ) -> bytes:
        return event(Completion(**shared, choices=choices, usage=usage), marks)

    while outputs := await generation.next():
        events = []
        for output in outputs:
            part = parts[output.index]
            part.add(output)
            marks.add(output.index, output.token_ids)
            # The first token goes out even if it shows nothing yet: the headers go with it.
            if output.text or output.finish or not part.begun:
                choice = part.take(generation, output.index)
                mark = marks.take(output.index, choice.finish_reason)
                events.append(chunk([choice], no_usage, mark))
        if events:
            yield b"".join(events)  # in one write, however far the client is behind
    if usage:
        yield chunk([], generation.usage)


def _parts(generation: Generation) -> list[_Part]:
    tokenizer = generation.service.tokenizer
    return [_Part(CompletionScorer(tokenizer)) for _ in range(generation.size)]
