"""Converts a body of /v1/responses to a body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, TypeGuard

from mla_router.worker.server.errors import InvalidField, InvalidRequest, MissingField
from mla_router.worker.server.schema.chat import (
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ContentPart,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    NamedUrl,
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
    InputPart,
    ResponsesRequest,
    ResponseToolChoice,
)
from mla_router.worker.server.schema.unsupported import refuse_unsupported

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = frozenset({"input_text", "output_text", "reasoning_text", "text", "refusal"})

_STATELESS = "this server keeps no responses; send the whole conversation as input"
# Unsupported fields, with the values besides null that have no effect, and the reason.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), _STATELESS),
    "conversation": ((), _STATELESS),
    "prompt": ((), "this server keeps no prompts; send the text as instructions and input"),
    "background": ((False,), _STATELESS),
    "max_tool_calls": ((), "only for tools that the server runs; here the client runs them"),
    "truncation": (("disabled",), "shorten the input instead"),
}
LOGPROBS = "message.output_text.logprobs"
# Values of `include` that are accepted. The second one has no effect.
_INCLUDABLE = frozenset({LOGPROBS, "reasoning.encrypted_content"})


def as_chat(body: ResponsesRequest, *, takes_images: bool) -> ChatRequest:
    """Converts a body. Raises InvalidRequest, which names the field."""
    _refuse(body)
    copied = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    choice: Any = body.tool_choice
    if isinstance(choice, ResponseToolChoice):
        choice = NamedToolChoice(FunctionName(choice.name))
    return ChatRequest(
        **copied,
        messages=_messages(body, takes_images),
        max_completion_tokens=body.max_output_tokens,
        logprobs=wants_logprobs(body),
        top_logprobs=body.top_logprobs,
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
        extra_key=body.extra_key,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        priority=body.priority,
        rid=body.rid,
    )


def wants_logprobs(body: ResponsesRequest) -> bool:
    return LOGPROBS in (body.include or ())


def _refuse(body: ResponsesRequest) -> None:
    for name, (neutral, why) in _REFUSED.items():
        value = getattr(body, name)
        if value is not None and not any(value is off or value == off for off in neutral):
            raise InvalidField(name, why, code="unsupported_parameter")
    if body.text is not None:
        refuse_unsupported(body.text, "text.")
    if body.n not in (None, 1):
        raise InvalidField("n", "a response has one answer; use /v1/chat/completions")
    if body.top_logprobs and not wants_logprobs(body):
        raise InvalidField("top_logprobs", f"needs include: [{LOGPROBS}]")
    for index, name in enumerate(body.include or []):
        if name not in _INCLUDABLE:
            raise InvalidField(f"include[{index}]", "not supported; leave it out")


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return JsonObjectFormat()
    if wanted.schema is None:
        raise MissingField("text.format.schema")
    return JsonSchemaFormat(NamedSchema(wanted.name or "", wanted.schema))


def _messages(body: ResponsesRequest, takes_images: bool) -> list[ChatMessage]:
    if body.input is None or body.input == []:
        raise MissingField("input")
    messages = _Messages(takes_images=takes_images)
    if body.instructions:
        messages.add("system", body.instructions)
    if isinstance(body.input, str):
        messages.add("user", body.input)
    else:
        for index, item in enumerate(body.input):
            messages.take(item, f"input[{index}]")
    return messages.finish()


class _Messages:
    """Collects messages from items. An item is a message or a part of one: the reasoning, the text and the calls of one
    answer are separate items."""

    def __init__(self, *, takes_images: bool) -> None:
        self._takes_images = takes_images
        self._messages: list[ChatMessage] = []
        self._with_images: list[tuple[ChatMessage, list[ContentPart]]] = []
        # Of each message. They are joined at the end, because items may be many
        self._texts: list[list[str]] = []

    def add(self, role: str, text: str) -> ChatMessage:
        message = ChatMessage(role)
        self._messages.append(message)
        self._texts.append([text])
        return message

    def take(self, item: InputItem, where: str) -> None:
        if item.type == "message":
            self._take_message(item, where)
        elif item.type == "reasoning":
            if item.content:  # encrypted or summarized reasoning has no text
                message = self.add("assistant", "")
                message.reasoning_content = _text(item.content, where + ".content")
        elif item.type == "function_call":
            self._take_call(item, where)
        elif item.type == "function_call_output":
            result = self.add("tool", _text(item.output, where + ".output"))
            result.tool_call_id = _required(item.call_id, where + ".call_id")
        else:
            raise InvalidField(
                where + ".type",
                "one of message, reasoning, function_call, function_call_output",
            )

    def _take_message(self, item: InputItem, where: str) -> None:
        if item.role not in ROLES:
            raise InvalidField(where + ".role", f"one of {', '.join(ROLES)}")
        if self._takes_images and item.role == "user" and _has_images(item.content):
            parts = _parts(item.content, where + ".content")
            self._with_images.append((self.add("user", ""), parts))
            return
        text = _text(item.content, where + ".content")
        last = self._last_answer()
        if item.role == "assistant" and last is not None and not last.tool_calls:
            self._texts[-1].append(text)
        else:
            self.add(item.role, text)

    def _take_call(self, item: InputItem, where: str) -> None:
        call = ToolCall(
            _required(item.call_id, where + ".call_id"),
            CalledFunction(
                _required(item.name, where + ".name"),
                _required(item.arguments, where + ".arguments"),
            ),
        )
        message = self._last_answer() or self.add("assistant", "")
        if message.tool_calls is None:
            message.tool_calls = []
        message.tool_calls.append(call)

    def _last_answer(self) -> ChatMessage | None:
        """Returns the message of the item before, if it is the model's."""
        last = self._messages[-1] if self._messages else None
        return last if last is not None and last.role == "assistant" else None

    def finish(self) -> list[ChatMessage]:
        for message, texts in zip(self._messages, self._texts, strict=True):
            message.content = "".join(texts) or (None if message.tool_calls else "")
        for message, parts in self._with_images:
            message.content = parts
        return self._messages


def _has_images(content: str | list[InputPart] | None) -> TypeGuard[list[InputPart]]:
    return isinstance(content, list) and any(part.type == "input_image" for part in content)


def _parts(content: list[InputPart], where: str) -> list[ContentPart]:
    """Returns the texts and images of a user's message."""
    parts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if part.type in TEXT_PARTS:
            parts.append(ContentPart("text", _text_of(part, place)))
        elif part.type == "input_image":
            refuse_unsupported(part, place + ".")
            field = place + ".image_url"
            url = NamedUrl(url=_required(part.image_url, field), field=field)
            parts.append(ContentPart("image_url", image_url=url))
        else:
            raise InvalidRequest(
                f"{place}: this model supports only input_text and input_image",
                param=f"{place}.type",
            )
    return parts


def _text(content: str | list[InputPart] | None, where: str) -> str:
    if content is None:
        raise MissingField(where)
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if part.type not in TEXT_PARTS:
            raise InvalidRequest(
                f"{place}: this model supports only text parts", param=f"{place}.type"
            )
        texts.append(_text_of(part, place))
    return "\n".join(texts)


def _text_of(part: InputPart, where: str) -> str:
    if part.type == "refusal":
        return _required(part.refusal, where + ".refusal")
    return _required(part.text, where + ".text")


def _required(value: str | None, where: str) -> str:
    if value is None:
        raise MissingField(where)
    return value
