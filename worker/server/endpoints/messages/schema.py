"""Responses of /v1/messages, in Anthropic's form."""

from __future__ import annotations

from typing import Any

import msgspec

from mla_router.worker.server.errors import ErrorDetail
from mla_router.worker.server.requests.usage import Usage


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""  # only servers with encrypted reasoning sign it


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True):
    input_tokens: int  # prompt tokens that were not cached
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0  # billed cache writes; there is no billing here

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(usage.prompt_tokens - cached, usage.completion_tokens, cached)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The complete message, or the message without blocks at the start of a stream."""

    id: str
    role: str = "assistant"
    model: str
    content: list[AnswerBlock] = []
    # end_turn, max_tokens, stop_sequence or tool_use; null before the end and after an abort
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class MessagesError(msgspec.Struct, frozen=True):
    """OpenAI's error shape with Anthropic's `type`."""

    error: ErrorDetail
    type: str = "error"
