"""The body of /v1/completions."""

from __future__ import annotations

from typing import Any

from mla_router.worker.server.schema.fields import OpenAIFields, PromptItems


class CompletionRequest(OpenAIFields, kw_only=True):
    prompt: str | PromptItems | None = None
    logprobs: int | None = None
    # refused unless neutral
    best_of: Any = None
    echo: Any = None
    suffix: Any = None
