"""The body of /v1/completions."""

from __future__ import annotations

from typing import Any

from mla_router.worker.server.schema.fields import OpenAIFields, PromptItem


class CompletionRequest(OpenAIFields, kw_only=True):
    prompt: str | list[PromptItem] | None = None
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    # refused unless neutral
    prompt_embeds: Any = None
    suffix: Any = None
