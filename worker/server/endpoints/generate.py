"""POST /generate: SGLang's native API. Each event of a stream repeats the text so far."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

import msgspec
from aiohttp import web

from mla_router.worker.server.endpoints.native_answer import GrowingAnswer
from mla_router.worker.server.endpoints.native_media import with_media
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.http.json_response import json_response
from mla_router.worker.server.http.parsed_body import read_parsed
from mla_router.worker.server.http.sse import event, stream
from mla_router.worker.server.request_names import check_rid
from mla_router.worker.server.requests.handler import RequestHandler
from mla_router.worker.server.requests.replay import read_replay
from mla_router.worker.server.schema.native import (
    GenerateRequest,
    NativeSamplingFields,
)
from mla_router.worker.server.schema.unsupported import refuse_unsupported
from mla_router.worker.server.state import STATE, Service
from mla_router.worker.server.validation.prompts import cache_key, read_prompts
from mla_router.worker.server.validation.sampling import (
    NO_LOGPROBS,
    CheckedSampling,
    NamedNumber,
    WantedLogprobs,
    check_sampling,
)

_decoder = msgspec.json.Decoder(GenerateRequest)

DEFAULT_MAX_TOKENS = 128  # SGLang's
MAX_TOP_LOGPROBS = 20  # as in a chat


async def generate(request: web.Request) -> web.StreamResponse:
    begun = time.monotonic()
    service = request.app[STATE].accepting()
    body = await read_parsed(request, _decoder)
    refuse_unsupported(body)
    sampling = _sampling(body, service)
    # Each event repeats the logprobs of all tokens. This worker does not have those that another worker sampled.
    replay = read_replay(
        request,
        body.continuation,
        possible=bool(body.stream) and not body.return_logprob,
    )
    prompts, single = await _prompts(body, service)
    prompts, images = await with_media(body, prompts, service)
    start = body.logprob_start_len
    if start is not None and not -1 <= start < min(map(len, prompts)):
        raise InvalidField("logprob_start_len", "must be -1, or a position within each prompt")
    handler = RequestHandler(
        service,
        prompts,
        "text" if body.input_ids is None else "input_ids",
        sampling,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        cache_key=cache_key(body.cache_salt, body.extra_key),
        name=check_rid(body.rid, len(prompts) * sampling.n),
        replay=replay,
        priority=body.priority,
        images=images,
    )
    async with handler.running():
        answers = [
            GrowingAnswer(
                handler,
                index,
                begun,
                token_texts=bool(body.return_text_in_logprobs),
                no_answer=body.no_answer,
            )
            for index in range(handler.size)
        ]
        numbered = not (single and sampling.n == 1)
        if body.stream:
            events = _events(handler, answers, numbered)
            return await stream(request, events, lambda: handler.headers)
        while outputs := await handler.next():
            for output in outputs:
                answers[output.index].add(output)
        whole = [answer.so_far(numbered=False) for answer in answers]
        return json_response(whole if numbered else whole[0], headers=handler.headers)


async def _events(
    handler: RequestHandler, answers: Sequence[GrowingAnswer], numbered: bool
) -> AsyncIterator[bytes]:
    for output in handler.resumed:
        answers[output.index].add(output)
    marks = handler.marks()
    while outputs := await handler.next():
        for output in outputs:
            answers[output.index].add(output)
            marks.add(output.index, output.token_ids)
        # One event for each choice, even if several of its outputs arrived.
        events = []
        for index in dict.fromkeys(output.index for output in outputs):
            finish = answers[index].finish
            mark = marks.take(index, finish.reason if finish else None)
            events.append(event(answers[index].so_far(numbered=numbered), mark))
        yield b"".join(events)


def _sampling(body: GenerateRequest, service: Service) -> CheckedSampling:
    native = body.sampling_params or NativeSamplingFields()
    top = body.top_logprobs_num or 0
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidField("top_logprobs_num", f"must be between 0 and {MAX_TOP_LOGPROBS}")
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    return check_sampling(
        native,
        # The scheduler generates at least one token. Without an answer it is not shown.
        max_tokens=NamedNumber(
            "sampling_params.max_new_tokens", 1 if body.no_answer else native.max_new_tokens
        ),
        min_tokens=NamedNumber("sampling_params.min_new_tokens", native.min_new_tokens),
        seed=NamedNumber("sampling_params.sampling_seed", native.sampling_seed),
        logprobs=WantedLogprobs(True, top, start + 1 if start >= 0 else None)
        if body.return_logprob
        else NO_LOGPROBS,
        vocab_size=service.limits.vocab_size,
        prefix="sampling_params.",
    )


async def _prompts(body: GenerateRequest, service: Service) -> tuple[list[list[int]], bool]:
    """Returns the prompts, and whether the request has a single prompt instead of a list."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidField("text", "give either text or input_ids")
    if body.input_ids is not None:
        prompts = await read_prompts(service, body.input_ids, "input_ids")
        return prompts, isinstance(body.input_ids[0], int)
    return await read_prompts(service, body.text, "text"), isinstance(body.text, str)
