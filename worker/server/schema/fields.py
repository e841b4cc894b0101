"""Fields that several endpoints share."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mla_router.worker.server.schema.continuation import Continuation
from mla_router.worker.server.schema.response_format import ResponseFormat
from mla_router.worker.server.schema.structured_outputs import StructuredOutputs
from mla_router.worker.server.schema.unsupported import UnsupportedFields

PromptItem = str | int | list[int]


class SamplingFields(UnsupportedFields, kw_only=True):
    """The sampling fields of all generating endpoints."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None  # vLLM: no other tokens are sampled
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    # Searched after each token; the text includes the match
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool | None = None  # SGLang: the text includes the stop string or token
    include_stop_str_in_output: bool | None = None  # vLLM: the same
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    stream_interval: int | None = None  # tokens of an answer that are sent together
    n: int | None = None
    # At most one of the following fields and `response_format`.
    json_schema: str | dict[str, Any] | bool | None = None  # SGLang: a string with a schema
    regex: str | None = None  # matches the whole answer
    ebnf: str | None = None  # its first rule is `root`
    structural_tag: str | dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None  # vLLM's
    # vLLM's older fields
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # token counts in each chunk


class RequestFields(SamplingFields, kw_only=True):
    """The fields that all generating endpoints except /generate share."""

    model: str | None = None
    stream: bool | None = None
    seed: int | None = None
    request_id: str | None = None  # vLLM: the id of the answer, after the endpoint's prefix
    cache_salt: str | None = None
    extra_key: str | None = None
    priority: int | None = None
    continuation: Continuation | None = None


class OpenAIFields(RequestFields, kw_only=True):
    """The fields that /v1/chat/completions and /v1/completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    rid: str | list[str] | None = None  # SGLang: the id of the answer, for /abort_request
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # logprobs have `token_id:5` instead of text
    prompt_logprobs: int | None = None  # number of likely tokens at each position of the prompt
    truncate_prompt_tokens: int | None = None  # -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None  # the end that is cut off
    add_special_tokens: bool | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether each chunk has token counts. `include_usage: false` switches them off, too."""
        options = self.stream_options
        return (
            options is not None
            and bool(options.continuous_usage_stats)
            and options.include_usage is not False
        )
