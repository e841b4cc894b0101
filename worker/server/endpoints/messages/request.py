"""Translates a body of /v1/messages to a body of /v1/chat/completions."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from mla_router.worker.server.endpoints.chat.prepare import FieldNames
from mla_router.worker.server.errors import InvalidField, MissingField
from mla_router.worker.server.schema.chat import (
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ContentPart,
    Effort,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    NamedUrl,
    ReasoningRequest,
    Tool,
    ToolCall,
)
from mla_router.worker.server.schema.fields import SamplingFields
from mla_router.worker.server.schema.messages import Block, MessagesRequest, Turn
from mla_router.worker.server.schema.response_format import JsonSchemaFormat, NamedSchema
from mla_router.worker.server.schema.unsupported import refuse_unsupported

FIELD_NAMES = FieldNames(
    max_tokens="max_tokens",
    tool="tools[{}].name",
    tool_schema="tools[{}].input_schema",
    format="output_config.format",
    schema="output_config.format.schema",
    stop="stop_sequences",
)
ERROR = "Error: "  # prefix of a result with is_error; chat templates have no field for it
Value = TypeVar("Value")


def as_chat(body: MessagesRequest, *, takes_images: bool) -> ChatRequest:
    """Returns the chat. Raises InvalidRequest, naming the field."""
    refuse_unsupported(body)
    if body.n not in (None, 1):
        raise InvalidField("n", "a message has one answer; use /v1/chat/completions")
    if body.stop is not None:
        raise InvalidField("stop", "it is called stop_sequences here")
    for index, tool in enumerate(body.tools or []):
        refuse_unsupported(tool, f"tools[{index}].")
    copied = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    messages = _messages(body, takes_images)
    tool_choice, several = _tool_choice(body)
    config = body.output_config
    schema = config.format.schema if config and config.format else None
    return ChatRequest(
        **copied | {"stop": body.stop_sequences},
        messages=messages,
        continue_final_message=_continues_answer(messages) or None,
        max_completion_tokens=body.max_tokens,
        tools=[
            Tool(FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict))
            for tool in body.tools or []
        ],
        tool_choice=tool_choice,
        parallel_tool_calls=several,
        response_format=None if schema is None else JsonSchemaFormat(NamedSchema("", schema)),
        reasoning=_reasoning(body, config.effort if config else None),
        include_reasoning=None if body.thinking is None else body.thinking.display != "omitted",
        chat_template_kwargs=body.chat_template_kwargs,
        seed=body.seed,
        cache_salt=body.cache_salt,
        extra_key=body.extra_key,
        priority=body.priority,
        rid=body.rid,
    )


def count_parts(body: MessagesRequest) -> int:
    """Returns the number of messages and blocks."""
    return len(body.messages) + sum(
        len(turn.content) for turn in body.messages if isinstance(turn.content, list)
    )


def _continues_answer(messages: list[ChatMessage]) -> bool:
    """Returns whether the last message is text of the assistant, which the answer continues."""
    last = messages[-1]
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def _tool_choice(
    body: MessagesRequest,
) -> tuple[Literal["none", "auto", "required"] | NamedToolChoice | None, bool | None]:
    """Returns `tool_choice` and `parallel_tool_calls` of the chat."""
    choice = body.tool_choice
    if choice is None:
        return None, None
    several = False if choice.disable_parallel_tool_use else None
    if choice.type == "tool":
        if choice.name is None:
            raise MissingField("tool_choice.name")
        return NamedToolChoice(FunctionName(choice.name)), several
    return "required" if choice.type == "any" else choice.type, several


def _reasoning(body: MessagesRequest, effort: Effort | None) -> ReasoningRequest | None:
    if body.thinking is not None:
        if body.thinking.budget_tokens is not None:
            raise InvalidField(
                "thinking.budget_tokens",
                "reasoning has no limit of its own here; send the type adaptive, without a budget",
                code="unsupported_parameter",
            )
        if body.thinking.type == "disabled":
            return ReasoningRequest(effort="none")
        return ReasoningRequest(effort=effort, enabled=True)
    return ReasoningRequest(effort=effort) if effort else None


def _messages(body: MessagesRequest, takes_images: bool) -> list[ChatMessage]:
    if body.messages is None:
        raise MissingField("messages")
    if not body.messages:
        raise InvalidField("messages", "give at least one message")
    messages = []
    if body.system:
        messages.append(ChatMessage("system", _text(body.system, "system")))
    for index, turn in enumerate(body.messages):
        where = f"messages[{index}].content"
        if isinstance(turn.content, str):
            messages.append(ChatMessage(turn.role, turn.content))
        elif turn.role == "assistant":
            messages.append(_assistant_message(turn.content, where))
        else:
            messages += _user_messages(turn, turn.content, where, takes_images)
    return messages


def _assistant_message(blocks: list[Block], where: str) -> ChatMessage:
    """Returns an assistant's message with text, reasoning and calls."""
    texts, reasoning, calls = [], [], []
    for at, block in enumerate(blocks):
        place = f"{where}[{at}]"
        if block.type == "thinking":
            reasoning.append(_required(block.thinking, place + ".thinking"))
        elif block.type == "redacted_thinking":
            continue  # encrypted by another server: it has no text
        elif block.type == "tool_use":
            arguments = msgspec.json.encode(_required(block.input, place + ".input")).decode()
            function = CalledFunction(_required(block.name, place + ".name"), arguments)
            calls.append(ToolCall(_required(block.id, place + ".id"), function))
        else:
            texts.append(_text_of(block, place, "text, thinking, tool_use"))
    return ChatMessage(
        "assistant",
        "\n".join(texts) or (None if calls else ""),
        reasoning_content="\n".join(reasoning) if reasoning else None,
        tool_calls=calls or None,
    )


def _user_messages(
    turn: Turn, blocks: list[Block], where: str, takes_images: bool
) -> list[ChatMessage]:
    """Returns a message for each result of a tool, and one for each run of texts and images between results."""
    is_user = turn.role == "user"
    takes_images = takes_images and is_user
    inner = ["text", "image"] if takes_images else ["text"]
    known = ", ".join([*inner, "tool_result"] if is_user else inner)
    messages: list[ChatMessage] = []
    parts: list[ContentPart] = []

    def end_message() -> None:
        if parts:
            messages.append(ChatMessage(turn.role, _content(parts)))
            parts.clear()

    for at, block in enumerate(blocks):
        place = f"{where}[{at}]"
        if block.type == "tool_result" and is_user:
            end_message()
            # SGLang's clients name the call in `id`.
            call = _required(block.tool_use_id or block.id, place + ".tool_use_id")
            content = block.content or ""
            if isinstance(content, str):
                content = [Block("text", text=content)]
            result = [
                _part_of(part, f"{place}.content[{index}]", takes_images, ", ".join(inner))
                for index, part in enumerate(content)
            ]
            shown = _content(result, ERROR if block.is_error else "")
            messages.append(ChatMessage("tool", shown, tool_call_id=call))
        else:
            parts.append(_part_of(block, place, takes_images, known))
    end_message()
    return messages or [ChatMessage(turn.role, "")]


def _part_of(block: Block, where: str, takes_images: bool, known: str) -> ContentPart:
    """Returns a text or an image of a message."""
    if block.type == "image" and takes_images:
        return ContentPart("image_url", image_url=_image(block, where + ".source"))
    return ContentPart("text", _text_of(block, where, known))


def _image(block: Block, where: str) -> NamedUrl:
    """Returns the data: URL of the bytes of an image, or its URL."""
    source = _required(block.source, where)
    if source.type == "base64":
        field = where + ".data"
        data = _required(source.data, field)
        # With the scheme, so that no text in `data` is a URL to fetch
        return NamedUrl(url=f"data:{source.media_type or ''};base64,{data}", field=field)
    if source.type == "url":
        field = where + ".url"
        return NamedUrl(url=_required(source.url, field), field=field)
    raise InvalidField(where + ".type", "one of base64, url; this server keeps no files")


def _content(parts: list[ContentPart], prefix: str = "") -> str | list[ContentPart]:
    """Returns the content of a message, which begins with `prefix`. It is a string unless it has images."""
    if any(part.text is None for part in parts):
        return [ContentPart("text", prefix), *parts] if prefix else list(parts)
    return prefix + "\n".join(part.text or "" for part in parts)


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text_of(block, f"{where}[{at}]") for at, block in enumerate(content))


def _text_of(block: Block, where: str, known: str = "text") -> str:
    if block.type != "text":
        raise InvalidField(where + ".type", f"this model takes {known}")
    return _required(block.text, where + ".text")


def _required(value: Value | None, where: str) -> Value:
    if value is None:
        raise MissingField(where)
    return value
