"""The body of /v1/messages and /v1/messages/count_tokens, Anthropic's API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mla_router.worker.server.schema.chat import Effort
from mla_router.worker.server.schema.fields import RequestFields
from mla_router.worker.server.schema.response_format import JsonSchema


class ImageSource(msgspec.Struct):
    """Names an image. The image's own bytes decide about its format, not `media_type`."""

    type: str
    media_type: str | None = None
    data: str | None = None  # of the type base64
    url: str | None = None  # of the type url


class Block(msgspec.Struct):
    """A part of a message. `type` decides which other fields are required."""

    type: str
    text: str | None = None  # of a text
    source: ImageSource | None = None  # of an image
    thinking: str | None = None  # of reasoning
    id: str | None = None  # of a tool_use, or of a tool_result without tool_use_id
    name: str | None = None  # of a tool_use
    input: dict[str, Any] | None = None  # of a tool_use
    tool_use_id: str | None = None  # of a tool_result
    content: str | list[Block] | None = None  # of a tool_result; null: empty
    is_error: bool | None = None  # of a tool_result


class Turn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessageTool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None  # other types run on Anthropic's servers
    description: str | None = None
    strict: bool | None = None
    # refused unless neutral
    allowed_callers: Any = None
    defer_loading: Any = None
    input_examples: Any = None


class MessageToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of the required tool
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: Literal["enabled", "adaptive", "disabled"]
    display: Literal["summarized", "omitted"] | None = None  # omitted: the answer has no reasoning
    budget_tokens: Any = None  # refused


class OutputFormat(msgspec.Struct):
    schema: JsonSchema
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct):
    format: OutputFormat | None = None
    effort: Effort | None = None


class MessagesRequest(RequestFields, kw_only=True):
    messages: list[Turn]
    system: str | list[Block] | None = None
    max_tokens: int | None = None  # required by /v1/messages
    stop_sequences: list[str] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    rid: str | None = None  # SGLang: the id of the answer, for /abort_request
    # refused unless neutral
    container: Any = None
    context_management: Any = None
    mcp_servers: Any = None
    output_format: Any = None
