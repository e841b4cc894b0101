"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mla_router.worker.server.schema.fields import OpenAIFields


class MediaUrl(msgspec.Struct):
    url: str
    detail: str | None = None  # no effect: the model takes all resolutions


class NamedUrl(MediaUrl, kw_only=True):
    """A URL of a client that uses another endpoint, with the name of its field. No chat request has this type."""

    field: str


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None  # of another model in the conversation; a text
    image_url: MediaUrl | str | None = None
    video_url: MediaUrl | str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str  # a JSON object in the model's own text


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    refusal: str | None = None  # of another model; the text of a message without content
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name for it
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # refused unless neutral
    function_call: Any = None
    prefix: Any = None
    tools: Any = None


class FunctionDefinition(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of the arguments; null: no arguments
    strict: bool | None = None


class Tool(msgspec.Struct):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct):
    name: str


class NamedToolChoice(msgspec.Struct):
    """The function that the answer must call."""

    function: FunctionName
    type: Literal["function"] = "function"


class Prediction(msgspec.Struct):
    """OpenAI's predicted output: a text that much of the answer will equal."""

    content: str | list[ContentPart]
    type: Literal["content"] = "content"


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningRequest(msgspec.Struct):
    effort: Effort | None = None
    enabled: bool | None = None


class ChatRequest(OpenAIFields, kw_only=True):
    messages: list[ChatMessage] | None = None
    prediction: Prediction | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None  # vLLM: the answer repeats the assistant's message that it continues
    separate_reasoning: bool | None = None  # false: reasoning is a part of the content
    include_reasoning: bool | None = None  # false: reasoning is not sent
    reasoning_effort: Effort | None = None
    reasoning: ReasoningRequest | None = None  # SGLang: the same
    # refused unless neutral
    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    function_call: Any = None
    functions: Any = None
    input_ids: Any = None
    return_meta_info: Any = None
    return_prompt_text: Any = None
    return_prompt_token_ids: Any = None
    stream_reasoning: Any = None
    task: Any = None
    verbosity: Any = None
    web_search_options: Any = None
