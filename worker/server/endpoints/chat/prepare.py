"""Prepares a conversation: the handler of its request, and the parser of its answers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from mla_router.worker.images import PlacedImage
from mla_router.worker.server.endpoints.chat.constraint import constraint_of
from mla_router.worker.server.endpoints.chat.media import media_of, placed
from mla_router.worker.server.endpoints.chat.prediction import prediction_tokens
from mla_router.worker.server.endpoints.chat.prompt import echoed, rendered
from mla_router.worker.server.endpoints.chat.tools import ToolUse, read_tools
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.request_names import check_rid
from mla_router.worker.server.requests.handler import RequestHandler
from mla_router.worker.server.requests.replay import Replay
from mla_router.worker.server.schema.chat import ChatRequest
from mla_router.worker.server.schema.unsupported import refuse_unsupported
from mla_router.worker.server.state import Service
from mla_router.worker.server.text.answer import AnswerParser
from mla_router.worker.server.text.reasoning import begins_inside
from mla_router.worker.server.validation.details import Details
from mla_router.worker.server.validation.prompts import Truncation, cache_key, check_ids
from mla_router.worker.server.validation.sampling import (
    CheckedSampling,
    NamedNumber,
    WantedLogprobs,
    check_sampling,
)

MAX_TOP_LOGPROBS = 20  # OpenAI's


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Field names that differ between endpoints, for error messages."""

    messages: str = "messages"
    max_tokens: str = "max_completion_tokens"
    tool: str = "tools[{}].function.name"  # `{}` is the index
    tool_schema: str = "tools[{}].function.parameters"
    format: str = "response_format"
    schema: str = "response_format.json_schema.schema"
    stop: str = "stop"


CHAT_NAMES = FieldNames()


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A checked and rendered request that does not run yet."""

    handler: RequestHandler
    tools: ToolUse
    details: Details
    reasoning_apart: bool
    reasoning_shown: bool
    begins_inside: bool  # the prompt has opened the reasoning
    echoed: str  # content before that of the answer

    @property
    def splits_reasoning(self) -> bool:
        """Whether reasoning is split from content. It may still be hidden."""
        return self.reasoning_apart and self.handler.service.answers.reasons

    def parser(self) -> AnswerParser:
        """Returns the parser of the text of one choice."""
        return self.handler.service.answers.parser(
            self.tools.functions,
            reasoning=self.reasoning_apart,
            inside=self.begins_inside,
            several=self.tools.several,
        )


async def prepare(
    service: Service,
    body: ChatRequest,
    replay: Replay | None,
    names: FieldNames = CHAT_NAMES,
    *,
    trace: str | None = None,
    token_by_token: bool = False,
) -> PreparedChat:
    """Checks and renders a request.

    `trace` is the client's X-Request-Id; `token_by_token`: one output for each token. Raises InvalidRequest, which
    names the field.
    """
    refuse_unsupported(body)
    tools = read_tools(body, names.tool, names.tool_schema)
    details = Details.of(body, _top_logprobs(body))
    truncation = Truncation(body.truncate_prompt_tokens, body.truncation_side)
    sampling = _sampling(body, names, details, service.limits.vocab_size)
    prompt = await _prompt(service, body, tools, names, truncation, sampling.max_tokens)
    continues = replay is not None and replay.origin is not None
    prediction = await prediction_tokens(service, body.prediction, continues=continues)
    tool_format = service.answers.tools
    markers = tool_format.markers if tool_format and tools.functions else frozenset()
    special = service.tokenizer.special_ids(markers)
    constraint = constraint_of(
        sampling.constraint, tools, tool_format, special, inside=prompt.begins_inside
    )
    handler = RequestHandler(
        service,
        [prompt.tokens],
        names.messages,
        dataclasses.replace(sampling, constraint=constraint),
        cache_key=cache_key(body.cache_salt, body.extra_key),
        name=check_rid(body.rid, sampling.n),
        trace=trace,
        replay=replay,
        priority=body.priority,
        markers=markers,
        token_by_token=token_by_token,
        prediction=prediction,
        images=[prompt.images],
    )
    return PreparedChat(
        handler,
        tools,
        details,
        reasoning_apart=body.separate_reasoning is not False,
        reasoning_shown=body.include_reasoning is not False,
        begins_inside=prompt.begins_inside,
        echoed=echoed(body),
    )


def _sampling(
    body: ChatRequest, names: FieldNames, details: Details, vocab_size: int
) -> CheckedSampling:
    max_tokens = NamedNumber("max_tokens", body.max_tokens)
    if body.max_completion_tokens is not None:
        max_tokens = NamedNumber(names.max_tokens, body.max_completion_tokens)
    sampling = check_sampling(
        body,
        max_tokens=max_tokens,
        min_tokens=NamedNumber("min_tokens", body.min_tokens),
        seed=NamedNumber("seed", body.seed),
        stop_field=names.stop,
        logprobs=WantedLogprobs(
            details.wants_logprobs, details.top, None if details.prompt_logprobs is None else 1
        ),
        vocab_size=vocab_size,
        response_format=body.response_format,
    )
    renamed = {CHAT_NAMES.format: names.format, CHAT_NAMES.schema: names.schema}
    if (constraint := sampling.constraint) is not None and constraint.field in renamed:
        constraint = dataclasses.replace(constraint, field=renamed[constraint.field])
    return dataclasses.replace(sampling, constraint=constraint)


class _Prompt(NamedTuple):
    tokens: list[int]
    images: list[PlacedImage]
    begins_inside: bool  # it opens the reasoning


async def _prompt(
    service: Service,
    body: ChatRequest,
    tools: ToolUse,
    names: FieldNames,
    truncation: Truncation,
    max_tokens: int | None,
) -> _Prompt:
    """Renders and tokenizes the conversation, and places its images. Raises InvalidRequest."""
    limits, media = service.limits, media_of(service)
    text = await rendered(service, body, tools, names.messages, media)
    tokens = await service.tokenizer.encode(
        text,
        context_length=limits.context_length,
        add_special_tokens=bool(body.add_special_tokens),  # the chat template has written its own
        field=names.messages,
    )
    tokens = truncation.cut(tokens, limits, max_tokens)
    check_ids(tokens, limits.vocab_size, names.messages)
    if media is not None and media.sources and truncation.limit is not None:
        raise InvalidField("truncate_prompt_tokens", "cannot be combined with images")
    tokens, images = await placed(service, tokens, media, names.messages)
    return _Prompt(tokens, images, begins_inside(text))


def _top_logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidField("top_logprobs", f"must be between 0 and {MAX_TOP_LOGPROBS}")
    if top and not body.logprobs:
        raise InvalidField("top_logprobs", "needs logprobs: true")
    return top if body.logprobs else None
