"""POST /generate: SGLang's native form. A stream repeats the whole text so far in each event."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from mla_router.worker.core import FinishReason
from mla_router.worker.server.body import read_body
from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.generation import Finish, Generation, Output
from mla_router.worker.server.prompts import read_prompts
from mla_router.worker.server.replay import read_replay
from mla_router.worker.server.responses import json_response
from mla_router.worker.server.sampling import check_sampling
from mla_router.worker.server.schema.native import GenerateRequest, NativeSampling
from mla_router.worker.server.schema.parse import parse
from mla_router.worker.server.schema.unsupported import refuse_unsupported
from mla_router.worker.server.sse import event, stream
from mla_router.worker.server.state import STATE

_decoder = msgspec.json.Decoder(GenerateRequest)

DEFAULT_MAX_TOKENS = 128  # SGLang's
MAX_RID_LENGTH = 256


@dataclass(slots=True)
class _Answer:
    """One choice so far."""

    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, output: Output) -> None:
        self.text += output.text
        self.output_ids += output.token_ids
        self.logprobs += output.scores.logprobs if output.scores else []
        self.finish = output.finish

    def as_dict(self, generation: Generation, index: int, begun: float) -> dict[str, Any]:
        usage = generation.usage_of(index)
        meta: dict[str, Any] = {
            "id": generation.rid_of(index),
            "finish_reason": None if self.finish is None else _finish(self, self.finish),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
        }
        if generation.sampling.params.logprobs:
            pairs = zip(self.logprobs, self.output_ids, strict=True)
            meta["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]
        if self.finish is not None:
            meta["e2e_latency"] = time.monotonic() - begun
        return {"text": self.text, "output_ids": self.output_ids, "meta_info": meta}


async def generate(request: web.Request) -> web.StreamResponse:
    service = request.app[STATE].accepting()
    body = parse(await read_body(request), _decoder)
    refuse_unsupported(body)
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("text: give either text or input_ids", param="text")
    if body.rid is not None and not 1 <= len(body.rid) <= MAX_RID_LENGTH:
        raise InvalidRequest(f"rid: 1 to {MAX_RID_LENGTH} characters", param="rid")
    native = body.sampling_params or NativeSampling()
    sampling = check_sampling(
        native,
        max_tokens=native.max_new_tokens,
        max_tokens_field="sampling_params.max_new_tokens",
        min_tokens=native.min_new_tokens,
        min_tokens_field="sampling_params.min_new_tokens",
        seed=native.sampling_seed,
        seed_field="sampling_params.sampling_seed",
        logprobs=bool(body.return_logprob),
        vocab_size=service.limits.vocab_size,
        prefix="sampling_params.",
    )
    # An event repeats the logprobs of all tokens: those that another worker has sampled are not here.
    replay = read_replay(
        request.headers,
        body.continuation,
        possible=bool(body.stream) and not body.return_logprob,
    )
    if body.input_ids is not None:
        prompts = await read_prompts(service, body.input_ids, "input_ids")
        single = isinstance(body.input_ids[0], int)
    else:
        # A list of strings is a list of prompt items, which the type checker cannot see.
        text: Any = body.text
        prompts = await read_prompts(service, text, "text")
        single = isinstance(body.text, str)
    single = single and sampling.n == 1
    begun = time.monotonic()
    generation = Generation(
        service, prompts, sampling, DEFAULT_MAX_TOKENS, body.cache_salt, body.rid, replay
    )
    async with generation.running():
        if body.stream:
            return await stream(
                request, _events(generation, single, begun), lambda: generation.headers
            )
        answers = [_Answer() for _ in range(generation.size)]
        while outputs := await generation.next():
            for output in outputs:
                answers[output.index].add(output)
        whole = [answer.as_dict(generation, i, begun) for i, answer in enumerate(answers)]
        return json_response(whole[0] if single else whole, headers=generation.headers)


async def _events(generation: Generation, single: bool, begun: float) -> AsyncIterator[bytes]:
    answers = [_Answer() for _ in range(generation.size)]
    for output in generation.resumed:
        answers[output.index].add(output)
    marks = generation.marks()
    while outputs := await generation.next():
        for output in outputs:
            answers[output.index].add(output)
            marks.add(output.index, output.token_ids)
        # One event a choice, however many of its tokens have come.
        events = []
        for index in dict.fromkeys(output.index for output in outputs):
            body = answers[index].as_dict(generation, index, begun)
            finish = answers[index].finish
            mark = marks.take(index, finish.reason if finish else None)
            events.append(event(body if single else {**body, "index": index}, mark))
        yield b"".join(events)


def _finish(answer: _Answer, finish: Finish) -> dict[str, Any]:
    if finish.reason == FinishReason.LENGTH.value:
        return {"type": finish.reason, "length": len(answer.output_ids)}
    if finish.reason == FinishReason.STOP.value:
        return {"type": finish.reason, "matched": finish.matched}
    return {"type": finish.reason, "message": "Aborted"}
