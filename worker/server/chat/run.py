"""What a conversation comes to: the generation of its answers, and how to read their text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgspec

from mla_router.worker.server.answer import AnswerParser
from mla_router.worker.server.background import beside_the_loop
from mla_router.worker.server.cache_key import cache_key
from mla_router.worker.server.chat.constrained import constraint_of
from mla_router.worker.server.chat.messages import for_template, text_of
from mla_router.worker.server.chat.tools import ToolUse, read_tools
from mla_router.worker.server.chat_template import ChatTemplate, Conversation
from mla_router.worker.server.details import Details
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.generation import Generation
from mla_router.worker.server.prompts import Truncation, check_ids
from mla_router.worker.server.reasoning import begins_inside
from mla_router.worker.server.replay import Replay
from mla_router.worker.server.request_names import check_rid
from mla_router.worker.server.sampling import check_sampling
from mla_router.worker.server.schema.chat import ChatMessage, ChatRequest, ReasoningRequest
from mla_router.worker.server.schema.unsupported import refuse_unsupported
from mla_router.worker.server.state import Service

MAX_TOP_LOGPROBS = 20  # OpenAI's
MAX_TEMPLATE_KWARGS = 4096  # bytes as JSON


@dataclass(frozen=True, slots=True)
class FieldNames:
    """How the client calls what endpoints call differently, for error messages."""

    messages: str = "messages"
    max_tokens: str = "max_completion_tokens"
    tool: str = "tools[{}].function.name"  # by its index
    schema: str = "response_format.json_schema.schema"


CHAT_NAMES = FieldNames()


@dataclass(frozen=True, slots=True)
class ChatRun:
    """Everything of a request that is checked and rendered; nothing of it runs yet."""

    generation: Generation
    tools: ToolUse
    details: Details
    reasoning_apart: bool
    reasoning_shown: bool
    begins_inside: bool  # the prompt has opened the reasoning
    echoed: str  # content that comes before the answer's own

    @property
    def splits_reasoning(self) -> bool:
        """Reasoning is told apart from content, whether it is shown or not."""
        return self.reasoning_apart and self.generation.service.answers.reasons

    def parser(self) -> AnswerParser:
        """For the text of one choice."""
        return self.generation.service.answers.parser(
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
) -> ChatRun:
    """`trace` is the client's X-Request-Id; `token_by_token`: an output for each token. Raises
    InvalidRequest, naming the field."""
    refuse_unsupported(body)
    tools = read_tools(body, names.tool)
    details = Details.of(body, _top_logprobs(body))
    truncation = Truncation(body.truncate_prompt_tokens, body.truncation_side)
    named = body.max_completion_tokens is not None
    sampling = check_sampling(
        body,
        max_tokens=body.max_completion_tokens if named else body.max_tokens,
        max_tokens_field=names.max_tokens if named else "max_tokens",
        min_tokens=body.min_tokens,
        seed=body.seed,
        logprobs=details.scored,
        top_logprobs=details.top,
        prompt_logprobs_from=None if details.prompt_logprobs is None else 1,
        vocab_size=service.limits.vocab_size,
        response_format=body.response_format,
    )
    tokenizer, answers = service.tokenizer, service.answers
    text = await rendered(service, body, tools, names.messages)
    prompt = await tokenizer.encode(
        text,
        context_length=service.limits.context_length,
        add_special_tokens=bool(body.add_special_tokens),  # the chat template has written its own
    )
    prompt = truncation.cut(prompt, service.limits, sampling.max_tokens)
    check_ids(prompt, service.limits.vocab_size, names.messages)
    inside = begins_inside(text)
    markers = answers.tools.markers if answers.tools and tools.functions else frozenset()
    special = tokenizer.special_ids(markers)
    constraint = constraint_of(sampling.constraint, tools, answers.tools, special, inside=inside)
    if constraint is not None and constraint.field == CHAT_NAMES.schema:
        constraint = dataclasses.replace(constraint, field=names.schema)
    generation = Generation(
        service,
        [prompt],
        dataclasses.replace(sampling, constraint=constraint),
        cache_key=cache_key(body.cache_salt, body.extra_key),
        name=check_rid(body.rid, sampling.n),
        trace=trace,
        replay=replay,
        priority=body.priority,
        markers=markers,
        token_by_token=token_by_token,
    )
    return ChatRun(
        generation,
        tools,
        details,
        reasoning_apart=body.separate_reasoning is not False,
        reasoning_shown=body.include_reasoning is not False,
        begins_inside=inside,
        echoed=_echoed(body),
    )


async def rendered(service: Service, body: ChatRequest, tools: ToolUse, field: str) -> str:
    """The prompt's text. `field`: what the client calls the messages. Raises InvalidRequest, naming the field."""
    messages, template = body.messages or [], service.tokenizer.template
    count = check_count(
        sum(1 + len(message.tool_calls or ()) + _parts(message) for message in messages),
        service.limits.context_length,
        field,
    )
    return await beside_the_loop(
        lambda: template.render(conversation(body, tools, template)), things=count
    )


def check_count(count: int, context_length: int, field: str) -> int:
    """Of messages and what they are made of, each of which takes a token and more. Before they are looked at,
    which takes many times as long as to read them. Returns it; raises InvalidRequest."""
    if count > context_length:
        raise InvalidField(
            field,
            f"{count} messages, parts and calls are more than the context length of "
            f"{context_length} tokens can hold",
            code="context_length_exceeded",
        )
    return count


def conversation(body: ChatRequest, tools: ToolUse, template: ChatTemplate) -> Conversation:
    """What `template` is to render. Raises InvalidRequest, naming the field."""
    messages = for_template(body.messages, arguments_as_objects=template.wants_objects)
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise InvalidField(
            "continue_final_message", "an answer goes on only without add_generation_prompt"
        )
    if goes_on and (messages[-1]["role"] != "assistant" or not messages[-1]["content"]):
        raise InvalidField(
            "continue_final_message", "the last message must be an assistant's, with content"
        )
    opens = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    variables = _thinking(body) | (body.chat_template_kwargs or {})
    if reserved := sorted(template.reserved & variables.keys()):
        raise InvalidField(
            "chat_template_kwargs", f"{reserved[0]} is none of the template's variables"
        )
    if len(msgspec.json.encode(variables)) > MAX_TEMPLATE_KWARGS:
        raise InvalidField("chat_template_kwargs", f"at most {MAX_TEMPLATE_KWARGS} bytes")
    return Conversation(messages, tools.rendered, opens, goes_on, variables)


def _echoed(body: ChatRequest) -> str:
    """vLLM's `echo`: the content of an assistant's last message, which `for_template` has checked."""
    last = body.messages[-1] if body.echo and body.messages else None
    if last is None or last.role != "assistant" or last.content is None:
        return ""
    return text_of(last.content)


def _thinking(body: ChatRequest) -> dict[str, Any]:
    """The template's variables for `reasoning_effort`, as SGLang has them: models have different names."""
    asked = body.reasoning or ReasoningRequest()
    effort = asked.effort or body.reasoning_effort
    if effort is None:
        return {"thinking": True, "enable_thinking": True} if asked.enabled else {}
    thinking = effort != "none"
    return {"reasoning_effort": effort, "thinking": thinking, "enable_thinking": thinking}


def _parts(message: ChatMessage) -> int:
    return len(message.content) if isinstance(message.content, list) else 0


def _top_logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidField("top_logprobs", f"must be between 0 and {MAX_TOP_LOGPROBS}")
    if top and not body.logprobs:
        raise InvalidField("top_logprobs", "needs logprobs: true")
    return top if body.logprobs else None
