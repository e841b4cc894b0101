"""POST /v1/completions: text or token ids, one prompt or several."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence

import msgspec
from aiohttp import web

from mla_router.worker.server.endpoints.completion_choice import Choice, CompletionChoice, Wanted
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.http.json_response import json_response
from mla_router.worker.server.http.parsed_body import read_parsed
from mla_router.worker.server.http.sse import PLACEHOLDER, TextEvent, event, stream
from mla_router.worker.server.request_names import check_rid, trace_of
from mla_router.worker.server.requests.handler import RequestHandler
from mla_router.worker.server.requests.replay import read_replay
from mla_router.worker.server.requests.timing import Timing
from mla_router.worker.server.requests.usage import Usage
from mla_router.worker.server.schema.completions import CompletionRequest
from mla_router.worker.server.schema.continuation import MAX_PROMPTS
from mla_router.worker.server.schema.unsupported import refuse_unsupported
from mla_router.worker.server.state import STATE, Service
from mla_router.worker.server.validation.defaults import fill_in
from mla_router.worker.server.validation.details import Details
from mla_router.worker.server.validation.prompts import Truncation, cache_key, read_prompts
from mla_router.worker.server.validation.sampling import NamedNumber, WantedLogprobs, check_sampling

_decoder = msgspec.json.Decoder(CompletionRequest)

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_LOGPROBS = 20  # vLLM's; OpenAI's is 5


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A response, and each chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType | None
    system_fingerprint: str
    metrics: Timing | msgspec.UnsetType = msgspec.UNSET


async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[STATE].accepting()
    body = await read_parsed(request, _decoder)
    model = service.check_model(body.model)
    refuse_unsupported(body)
    fill_in(body, service.config)
    wanted = _wanted(body)
    details = wanted.details
    shows_prompt = wanted.echo and details.logprobs is not None
    truncation = Truncation(body.truncate_prompt_tokens, body.truncation_side)
    sampling = check_sampling(
        body,
        max_tokens=NamedNumber("max_tokens", 1 if wanted.no_answer else body.max_tokens),
        min_tokens=NamedNumber("min_tokens", body.min_tokens),
        seed=NamedNumber("seed", body.seed),
        logprobs=WantedLogprobs(
            details.wants_logprobs or wanted.computed > wanted.n,
            details.top,
            1 if shows_prompt or details.prompt_logprobs is not None else None,
        ),
        vocab_size=service.limits.vocab_size,
        response_format=body.response_format,
    )
    sampling = dataclasses.replace(sampling, n=wanted.computed)
    replay = read_replay(request, body.continuation, possible=bool(body.stream))
    prompts = await read_prompts(
        service, body.prompt, "prompt", add_special_tokens=body.add_special_tokens is not False
    )
    prompts = [truncation.cut(prompt, service.limits, sampling.max_tokens) for prompt in prompts]
    if wanted.computed > wanted.n and len(prompts) * wanted.computed > MAX_PROMPTS:
        raise InvalidField("best_of", f"for all prompts together at most {MAX_PROMPTS}")
    choices = await _choices(service, prompts, wanted)
    handler = RequestHandler(
        service,
        prompts,
        "prompt",
        sampling,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        cache_key=cache_key(body.cache_salt, body.extra_key),
        name=check_rid(body.rid, len(prompts) * wanted.computed),
        replay=replay,
        priority=body.priority,
        trace=trace_of(request.headers, body.request_id),
    )
    async with handler.running():
        if body.stream:
            events = _events(handler, choices, wanted, model, body)
            return await stream(request, events, lambda: handler.headers)
        return await _response(handler, choices, wanted, model)


def _wanted(body: CompletionRequest) -> Wanted:
    """Checks the fields about the parts of the answers. Raises InvalidField."""
    n = 1 if body.n is None else body.n
    computed = n if body.best_of is None else body.best_of
    if body.best_of is not None and not n <= computed <= MAX_PROMPTS:
        raise InvalidField("best_of", f"must be between n, which is {n}, and {MAX_PROMPTS}")
    if computed > n and body.stream:
        raise InvalidField(
            "best_of", "cannot be combined with stream: the best are known only at the end"
        )
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise InvalidField("logprobs", f"must be between 0 and {MAX_LOGPROBS}")
    return Wanted(
        n,
        computed,
        Details.of(body, body.logprobs),
        echo=bool(body.echo),
        no_answer=body.max_tokens == 0,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


async def _choices(
    service: Service, prompts: Sequence[list[int]], wanted: Wanted
) -> list[CompletionChoice]:
    choices = []
    for prompt in prompts:
        shown = ""
        if wanted.echo:
            tokenizer = service.tokenizer
            decode = tokenizer.decode_shown if wanted.skip_special_tokens else tokenizer.decode
            shown = await asyncio.to_thread(decode, prompt)
        choices += [
            CompletionChoice(service.tokenizer, wanted, prompt, shown)
            for _ in range(wanted.computed)
        ]
    return choices


async def _response(
    handler: RequestHandler, choices: list[CompletionChoice], wanted: Wanted, model: str
) -> web.Response:
    while outputs := await handler.next():
        for output in outputs:
            choices[output.index].add(output)
    shown: list[CompletionChoice] = []
    for start in range(0, len(choices), handler.sampling.n):
        answers = choices[start : start + handler.sampling.n]
        if len(answers) > wanted.n:
            answers = sorted(answers, key=lambda choice: -choice.mean_logprob)[: wanted.n]
        shown += answers
    completion = Completion(
        **handler.identity.envelope("cmpl-", model),
        choices=[await choice.complete(index) for index, choice in enumerate(shown)],
        usage=_usage(handler, wanted),
        metrics=handler.timing,
    )
    return json_response(completion, headers=handler.headers)


async def _events(
    handler: RequestHandler,
    choices: list[CompletionChoice],
    wanted: Wanted,
    model: str,
    body: CompletionRequest,
) -> AsyncIterator[bytes]:
    shared = handler.identity.envelope("cmpl-", model)
    counted, details = body.wants_continuous_usage, wanted.details
    # If the stream has usage at all, the earlier chunks have null.
    no_usage = None if body.wants_usage else msgspec.UNSET
    # Most chunks then differ only in their text: all but the first and last ones of a choice.
    uniform = details.logprobs is None and not details.token_ids and not counted
    for output in handler.resumed:
        choices[output.index].skip(output)
    marks = handler.marks()

    plain = [
        TextEvent(Completion(**shared, choices=[Choice(index, PLACEHOLDER)], usage=no_usage))
        for index in range(handler.size)
    ]
    while outputs := await handler.next():
        events = []
        for output in outputs:
            choice = choices[output.index]
            choice.add(output)
            marks.add(output.index, output.token_ids)
            # The first token is sent even without text, because the headers go out with it.
            if output.text or output.finish or not choice.begun:
                sent = await choice.take(output.index)
                mark = marks.take(output.index, sent.finish_reason)
                if uniform and sent.finish_reason is None:
                    events.append(plain[output.index].of(sent.text, mark))
                else:
                    usage = _usage_of(handler, output.index, wanted) if counted else no_usage
                    chunk = Completion(**shared, choices=[sent], usage=usage)
                    events.append(event(chunk, mark))
        if events:
            yield b"".join(events)  # one write, even if the client is far behind
    if body.wants_usage:
        usage, timing = _usage(handler, wanted), handler.timing
        yield event(Completion(**shared, choices=[], usage=usage, metrics=timing))


def _usage(handler: RequestHandler, wanted: Wanted) -> Usage:
    return handler.usage.of_prompt if wanted.no_answer else handler.usage


def _usage_of(handler: RequestHandler, index: int, wanted: Wanted) -> Usage:
    usage = handler.usage_of(index)
    return usage.of_prompt if wanted.no_answer else usage
