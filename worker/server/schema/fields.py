"""What several endpoints spell alike."""

from __future__ import annotations

from typing import Any

import msgspec

from mla_router.worker.server.schema.continuation import Continuation
from mla_router.worker.server.schema.response_format import ResponseFormat

PromptItems = list[str | int | list[int]]


class SamplingFields(msgspec.Struct, kw_only=True):
    """What all generating endpoints spell alike."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    # at most one of these and `response_format`
    json_schema: str | dict[str, Any] | bool | None = (
        None  # a string with a schema, as SGLang has it
    )
    regex: str | None = None  # matches the whole answer
    ebnf: str | None = None  # its first rule is `root`
    structural_tag: str | dict[str, Any] | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class OpenAIFields(SamplingFields, kw_only=True):
    """What OpenAI's two endpoints share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    continuation: Continuation | None = None
    response_format: ResponseFormat | None = None
    # refused unless null: vLLM's, which change what may be answered
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None

    @property
    def wants_usage(self) -> bool:
        """A stream ends with a chunk of token counts only if the client asked for it."""
        return self.stream_options is not None and self.stream_options.include_usage
