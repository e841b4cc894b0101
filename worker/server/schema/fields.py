"""What several endpoints spell alike."""

from __future__ import annotations

from typing import Any

import msgspec

from mla_router.worker.server.schema.continuation import Continuation

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
    # refused unless neutral
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None


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
    response_format: Any = None

    @property
    def wants_usage(self) -> bool:
        """A stream ends with a chunk of token counts only if the client asked for it."""
        return self.stream_options is not None and self.stream_options.include_usage
