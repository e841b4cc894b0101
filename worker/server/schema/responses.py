"""The body of /v1/responses."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mla_router.worker.server.schema.chat import Effort
from mla_router.worker.server.schema.fields import RequestFields


class InputPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None  # of another model in the conversation; a text
    image_url: str | None = None
    detail: str | None = None  # no effect
    file_id: Any = None  # refused: this server keeps no files


class InputItem(msgspec.Struct):
    """A message, a call, the result of a call, or reasoning. The required fields depend on `type`, which messages may
    omit."""

    type: str = "message"
    role: str | None = None  # of a message
    content: str | list[InputPart] | None = None  # of a message, or of reasoning
    call_id: str | None = None  # of a call and of its result
    name: str | None = None  # of a call
    arguments: str | None = None  # of a call
    output: str | list[InputPart] | None = None  # of a result


class ResponseTool(msgspec.Struct):
    name: str
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of the arguments; null: no arguments
    strict: bool | None = None


class ResponseToolChoice(msgspec.Struct):
    """The function that the answer must call."""

    name: str
    type: Literal["function"] = "function"


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextSettings(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: Any = None  # refused unless neutral


class ReasoningSettings(msgspec.Struct):
    effort: Effort | None = None


class ResponsesRequest(RequestFields, kw_only=True):
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    reasoning: ReasoningSettings | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    rid: str | None = None  # SGLang: the id of the answer, for /abort_request
    # refused unless neutral
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None
    max_tool_calls: Any = None
    truncation: Any = None
