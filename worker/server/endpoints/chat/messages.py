"""Checks the messages of a request and converts them to the form of chat templates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from mla_router.worker.server.errors import InvalidField, InvalidRequest, MissingField
from mla_router.worker.server.media.source import Kind, Source
from mla_router.worker.server.schema.chat import (
    ChatMessage,
    ContentPart,
    MediaUrl,
    NamedUrl,
    ToolCall,
)
from mla_router.worker.server.schema.unsupported import refuse_unsupported

# `developer` is OpenAI's newer name of `system`; templates know only the older one.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(slots=True)
class Media:
    """The images and videos of a conversation in order."""

    placeholders: dict[str, str]  # by kind: the texts in a template that takes no parts
    sources: list[Source] = field(default_factory=list)


def for_template(
    messages: list[ChatMessage] | None,
    *,
    arguments_as_objects: bool,
    as_parts: bool = False,
    media: Media | None = None,
) -> list[dict[str, Any]]:
    """Returns the messages for a template, and adds their images to `media`; None: images are refused. `as_parts`: the
    template takes a content as a list. Raises InvalidRequest for the first invalid message, and names its field."""
    if messages is None:
        raise MissingField("messages")
    if not messages:
        raise InvalidField("messages", "give at least one message")
    return [
        _message(message, f"messages[{index}]", arguments_as_objects, as_parts, media)
        for index, message in enumerate(messages)
    ]


def _message(
    message: ChatMessage,
    where: str,
    arguments_as_objects: bool,
    as_parts: bool,
    media: Media | None,
) -> dict[str, Any]:
    refuse_unsupported(message, where + ".")
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidField(where + ".role", f"one of {', '.join(ROLES)}")
    parts = _parts(message, where, media)
    content = _as_list(parts) if as_parts else _as_text(parts, media)
    rendered: dict[str, Any] = {"role": role, "content": content}
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


# A part for templates: a text, or an image or a video.
Part = str | Source


def _parts(message: ChatMessage, where: str, media: Media | None) -> list[Part] | None:
    """Returns the parts of a message, and adds its images and videos to `media`."""
    if message.content is None:
        if message.role != "assistant":
            raise InvalidField(where + ".content", "must not be null")
        if message.tool_calls and not message.refusal:
            return None
        return [message.refusal or ""]
    if isinstance(message.content, str):
        return [message.content]
    parts: list[Part] = []
    for index, part in enumerate(message.content):
        place = f"{where}.content[{index}]"
        if part.type in ("text", "refusal"):
            text: str | None = getattr(part, part.type)
            if text is None:
                raise MissingField(f"{place}.{part.type}")
            parts.append(text)
        elif media is not None and (source := _source(part, place)) is not None:
            media.sources.append(source)
            parts.append(source)
        else:
            known = "type text" if media is None else "types text, image_url and video_url"
            raise InvalidRequest(
                f"{place}: this model supports only parts of {known}", param=f"{place}.type"
            )
    return parts


def _source(part: ContentPart, place: str) -> Source | None:
    """Returns the image or video of a part; None for another type. Raises InvalidField."""
    if part.type == "image_url":
        return _source_of(part.image_url, place + ".image_url", "image")
    if part.type == "video_url":
        return _source_of(part.video_url, place + ".video_url", "video")
    return None


def _source_of(given: MediaUrl | str | None, place: str, kind: Kind) -> Source:
    if given is None:
        raise MissingField(place)
    if isinstance(given, str):
        return Source(given, place, kind)
    return Source(given.url, given.field if isinstance(given, NamedUrl) else place, kind)


def _as_list(parts: list[Part] | None) -> list[dict[str, str]] | None:
    if parts is None:
        return None
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
        for part in parts
    ]


def _as_text(parts: list[Part] | None, media: Media | None) -> str | None:
    if parts is None:
        return None
    placeholders = {} if media is None else media.placeholders
    return "\n".join(part if isinstance(part, str) else placeholders[part.kind] for part in parts)


def text_of(content: str | list[ContentPart]) -> str:
    """Returns the text of a message's content. Several parts are separated by newlines."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text or part.refusal or "" for part in content)


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
