"""Checks the messages of a request and converts them to the form of chat templates."""

from __future__ import annotations

from typing import Any

import msgspec

from mla_router.worker.server.errors import InvalidField, InvalidRequest
from mla_router.worker.server.schema.chat import ChatMessage, ContentPart, ToolCall
from mla_router.worker.server.schema.unsupported import refuse_unsupported

# `developer` is OpenAI's newer name of `system`; templates know only the older one.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def for_template(
    messages: list[ChatMessage] | None, *, arguments_as_objects: bool
) -> list[dict[str, Any]]:
    """Returns the messages for a template. Raises InvalidRequest for the first invalid message, and names its field."""
    if not messages:
        raise InvalidField("messages", "give at least one message")
    return [
        _message(message, f"messages[{index}]", arguments_as_objects)
        for index, message in enumerate(messages)
    ]


def _message(message: ChatMessage, where: str, arguments_as_objects: bool) -> dict[str, Any]:
    refuse_unsupported(message, where + ".")
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidField(where + ".role", f"one of {', '.join(ROLES)}")
    rendered: dict[str, Any] = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        rendered["name"] = message.name
    reasoning = message.reasoning_content
    if reasoning is None:
        reasoning = message.reasoning
    if reasoning is not None and role == "assistant":
        rendered["reasoning_content"] = reasoning
    if role == "tool":
        if message.tool_call_id is None:
            raise InvalidField(
                where + ".tool_call_id", "must be the id of the call with this result"
            )
        rendered["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if role != "assistant":
            raise InvalidField(where + ".tool_calls", "only an assistant's message may have calls")
        rendered["tool_calls"] = [_call(call, arguments_as_objects) for call in message.tool_calls]
    return rendered


def _content(message: ChatMessage, where: str) -> str | None:
    if message.content is None:
        if message.role == "assistant" and message.tool_calls:
            return None
        raise InvalidField(where + ".content", "must not be null")
    if isinstance(message.content, str):
        return message.content
    for index, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(
                f"{where}.content[{index}]: this model supports only parts of type text",
                param=f"{where}.content[{index}].type",
            )
    return text_of(message.content)


def text_of(content: str | list[ContentPart]) -> str:
    """Returns the text of a message's content. Several parts are separated by newlines."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text or "" for part in content)


def _call(call: ToolCall, arguments_as_objects: bool) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if arguments_as_objects:
        arguments = _object(arguments)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}


def _object(arguments: str) -> dict[str, Any] | str:
    """Returns the decoded arguments of a call, or the text itself if it is not a JSON object. A client returns the
    text of the model, which may be invalid or cut off."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
