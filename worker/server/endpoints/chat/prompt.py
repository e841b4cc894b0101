"""The prompt's text: a conversation, rendered by the chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from mla_router.worker.server.endpoints.chat.messages import for_template, text_of
from mla_router.worker.server.endpoints.chat.tools import ToolUse
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.schema.chat import ChatMessage, ChatRequest, ReasoningRequest
from mla_router.worker.server.state import Service
from mla_router.worker.server.text.chat_template import ChatTemplate, Conversation

MAX_TEMPLATE_KWARGS = 4096  # bytes as JSON
# Messages, items and the like: to convert and render one takes some microseconds.
MAX_INLINE = 256

Result = TypeVar("Result")


async def beside_the_loop(work: Callable[[], Result], *, things: int) -> Result:
    """What `work` returns, in a thread if it is about so many things that the loop had better go on meanwhile."""
    return work() if things <= MAX_INLINE else await asyncio.to_thread(work)


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


def echoed(body: ChatRequest) -> str:
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
