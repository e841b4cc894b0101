"""Response types of /v1/responses."""

from __future__ import annotations

import msgspec

from mla_router.worker.server.endpoints.logprobs import TokenLogprob
from mla_router.worker.server.requests.usage import Usage
from mla_router.worker.server.schema.responses import (
    ResponseTool,
    ResponseToolChoice,
    TextSettings,
)


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[str] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: str
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: str
    summary: list[str] = []
    content: list[ReasoningText] = []


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str = ""


Item = MessageItem | ReasoningItem | CallItem


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0  # for paid caches


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage, reasoning_tokens: int) -> ResponseUsage:
        return cls(
            usage.prompt_tokens,
            InputDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputDetails(reasoning_tokens),
            usage.total_tokens,
        )


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str | None


class ReasoningSettings(msgspec.Struct, frozen=True):
    effort: None = None
    summary: None = None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    model: str
    output: list[Item] = []
    usage: ResponseUsage | None = None
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    text: TextSettings
    tool_choice: str | ResponseToolChoice
    tools: list[ResponseTool]
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    # Constant fields, which Open Responses requires.
    max_tool_calls: None = None
    service_tier: str = "default"
    prompt_cache_key: None = None
    safety_identifier: None = None
    background: bool = False
    previous_response_id: None = None
    reasoning: ReasoningSettings = ReasoningSettings()
    store: bool = False
    truncation: str = "disabled"
