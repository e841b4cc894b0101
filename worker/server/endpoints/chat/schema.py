"""Response types of /v1/chat/completions: OpenAI's, with DeepSeek's `reasoning_content` and vLLM's additions."""

from __future__ import annotations

import msgspec

from mla_router.worker.server.endpoints.logprobs import ChatLogprobs, PromptLogprobs
from mla_router.worker.server.requests.timing import Timing
from mla_router.worker.server.requests.usage import Usage


class Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    type: str
    function: Function


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    annotations: list[str] = []
    reasoning_content: str | None  # never absent, because SGLang's clients expect the field
    reasoning: str | None  # the same, under vLLM's name
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class Choice(msgspec.Struct, frozen=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str
    matched_stop: str | int | None  # SGLang's
    stop_reason: str | int | None  # vLLM's
    token_ids: list[int] | None


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    metrics: Timing | msgspec.UnsetType = msgspec.UNSET


class FunctionPiece(msgspec.Struct, omit_defaults=True):
    arguments: str  # the pieces add up to the arguments
    name: str | None = None


class CallPiece(msgspec.Struct, omit_defaults=True):
    """The new part of a call. The first piece has its id, type and name."""

    index: int
    function: FunctionPiece
    id: str | None = None
    type: str | None = None


class Piece(msgspec.Struct):
    """The delta of a chunk. Fields without news are absent, except `reasoning_content`."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET  # the same under vLLM's name
    tool_calls: list[CallPiece] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Piece
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None
    system_fingerprint: str
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    metrics: Timing | msgspec.UnsetType = msgspec.UNSET
