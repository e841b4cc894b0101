"""Renders a conversation with the chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from mla_router.worker.server.endpoints.chat.messages import Media, for_template, text_of
from mla_router.worker.server.endpoints.chat.tools import ToolUse
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.schema.chat import ChatMessage, ChatRequest, ReasoningRequest
from mla_router.worker.server.state import Service
from mla_router.worker.server.text.chat_template import ChatTemplate, Conversation

MAX_TEMPLATE_KWARGS = 4096  # bytes as JSON
# Messages and items. To convert and render one takes some microseconds; more are handled in a thread.
MAX_INLINE = 256

Result = TypeVar("Result")


async def in_thread_if_many(work: Callable[[], Result], *, count: int) -> Result:
    """Returns the result of `work`, which runs in a thread if it handles more than MAX_INLINE items."""
    return work() if count <= MAX_INLINE else await asyncio.to_thread(work)


async def rendered(
    service: Service, body: ChatRequest, tools: ToolUse, field: str, media: Media | None = None
) -> str:
    """Returns the text of the prompt, and adds the images of the messages to `media`; None: images are refused. `field`
    is the client's field of the messages. Raises InvalidRequest."""
    messages, template = body.messages or [], service.tokenizer.template
    count = check_count(
        sum(1 + len(message.tool_calls or ()) + _parts(message) for message in messages),
        service.limits.context_length,
        field,
    )
    return await in_thread_if_many(
        lambda: template.render(
            conversation(
                body,
                tools,
                template,
                as_parts=service.media is not None and template.takes_parts,
                media=media,
            )
        ),
        count=count,
    )


def check_count(count: int, context_length: int, field: str) -> int:
    """Returns `count`, the number of messages, parts and calls. Raises InvalidRequest if they cannot fit, as each
    needs a token. This check comes before the conversion, which is slower than parsing."""
    if count > context_length:
        raise InvalidField(
            field,
            f"the input ({count} messages, parts and calls) is longer than the model's context length "
            f"({context_length} tokens)",
            code="context_length_exceeded",
        )
    return count


def conversation(
    body: ChatRequest,
    tools: ToolUse,
    template: ChatTemplate,
    *,
    as_parts: bool,
    media: Media | None,
) -> Conversation:
    """Returns the input of `template`. Raises InvalidRequest, which names the field."""
    messages = for_template(
        body.messages,
        arguments_as_objects=template.wants_objects,
        as_parts=as_parts,
        media=media,
    )
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise InvalidField(
            "continue_final_message", "cannot be combined with add_generation_prompt"
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
    """Returns the content of the last message if it is an assistant's and the request has vLLM's `echo`, else "". Call
    `for_template` first, which checks it."""
    last = body.messages[-1] if body.echo and body.messages else None
    if last is None or last.role != "assistant" or last.content is None:
        return ""
    return text_of(last.content)


def _thinking(body: ChatRequest) -> dict[str, Any]:
    """Returns the template variables of `reasoning_effort`, under the names of several models, as in SGLang."""
    asked = body.reasoning or ReasoningRequest()
    effort = asked.effort or body.reasoning_effort
    if effort is None:
        return {"thinking": True, "enable_thinking": True} if asked.enabled else {}
    thinking = effort != "none"
    return {"reasoning_effort": effort, "thinking": thinking, "enable_thinking": thinking}


def _parts(message: ChatMessage) -> int:
    return len(message.content) if isinstance(message.content, list) else 0
