"""A body of /v1/responses as a body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.schema.chat import (
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ContentPart,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    Tool,
    ToolCall,
)
from mla_router.worker.server.schema.fields import SamplingFields
from mla_router.worker.server.schema.response_format import (
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
)
from mla_router.worker.server.schema.responses import (
    InputItem,
    ResponsesRequest,
    ResponseToolChoice,
)

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = frozenset({"input_text", "output_text", "reasoning_text", "text"})

_STATELESS = "this server keeps no responses; send the whole conversation as input"
# Fields that cannot be honoured: the values, besides null, that do no harm, and why not.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), _STATELESS),
    "conversation": ((), _STATELESS),
    "prompt": ((), "this server keeps no prompts; send the text as instructions and input"),
    "background": ((False,), _STATELESS),
    "max_tool_calls": ((), "only for tools that the server runs; here the client runs them"),
    "truncation": (("disabled",), "shorten the input instead"),
    "top_logprobs": ((0,), "use /v1/chat/completions"),
}
# Parts of an answer that may be asked for without being there.
_INCLUDABLE = frozenset({"reasoning.encrypted_content"})


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """Raises InvalidRequest, naming the field."""
    _refuse(body)
    sampling = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    choice: Any = body.tool_choice
    if isinstance(choice, ResponseToolChoice):
        choice = NamedToolChoice(FunctionName(choice.name))
    return ChatRequest(
        **sampling,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        tools=[
            Tool(FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict))
            for tool in body.tools or []
        ],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
        chat_template_kwargs=body.chat_template_kwargs,
        seed=body.seed,
        cache_salt=body.cache_salt,
        priority=body.priority,
    )


def _refuse(body: ResponsesRequest) -> None:
    for name, (neutral, why) in _REFUSED.items():
        value = getattr(body, name)
        if value is not None and not any(value is off or value == off for off in neutral):
            raise InvalidRequest(f"{name}: {why}", param=name, code="unsupported_parameter")
    if body.n not in (None, 1):
        raise _invalid("n", "a response has one answer; use /v1/chat/completions")
    for index, name in enumerate(body.include or []):
        if name not in _INCLUDABLE:
            raise _invalid(f"include[{index}]", "not supported; leave it out")


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return JsonObjectFormat()
    if wanted.schema is None:
        raise _invalid("text.format.schema", "must be given")
    return JsonSchemaFormat(NamedSchema(wanted.name or "", wanted.schema))


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    if body.input is None or body.input == []:
        raise _invalid("input", "must be given")
    messages = []
    if body.instructions:
        messages.append(ChatMessage("system", body.instructions))
    if isinstance(body.input, str):
        return [*messages, ChatMessage("user", body.input)]
    for index, item in enumerate(body.input):
        _append(messages, item, f"input[{index}]")
    return messages


def _append(messages: list[ChatMessage], item: InputItem, where: str) -> None:
    """One item is a message or a part of one: reasoning, text and calls of one answer come as
    items of their own."""
    if item.type == "message":
        if item.role not in ROLES:
            raise _invalid(where + ".role", f"one of {', '.join(ROLES)}")
        text = _text(item.content, where + ".content")
        last = messages[-1] if messages else None
        if item.role == "assistant" and last and last.role == "assistant" and not last.tool_calls:
            last.content = (last.content or "") + text if isinstance(last.content, str) else text
        else:
            messages.append(ChatMessage(item.role, text))
    elif item.type == "reasoning":
        # Without text if it was encrypted, or summed up, elsewhere.
        messages.append(ChatMessage("assistant", ""))
        if item.content is not None:
            messages[-1].reasoning_content = _text(item.content, where + ".content")
    elif item.type == "function_call":
        call = ToolCall(
            _given(item.call_id, where + ".call_id"),
            CalledFunction(
                _given(item.name, where + ".name"), _given(item.arguments, where + ".arguments")
            ),
        )
        if not messages or messages[-1].role != "assistant":
            messages.append(ChatMessage("assistant"))
        messages[-1].content = messages[-1].content or None
        messages[-1].tool_calls = [*(messages[-1].tool_calls or []), call]
    elif item.type == "function_call_output":
        result = ChatMessage("tool", _text(item.output, where + ".output"))
        result.tool_call_id = _given(item.call_id, where + ".call_id")
        messages.append(result)
    else:
        raise _invalid(
            where + ".type",
            "one of message, reasoning, function_call, function_call_output",
        )


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    if content is None:
        raise _invalid(where, "must be given")
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type not in TEXT_PARTS or part.text is None:
            raise InvalidRequest(
                f"{where}[{index}]: this model takes only parts of text",
                param=f"{where}[{index}].type",
            )
    return "\n".join(part.text or "" for part in content)


def _given(value: str | None, where: str) -> str:
    if value is None:
        raise _invalid(where, "must be given")
    return value


def _invalid(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {message}", param=field)
