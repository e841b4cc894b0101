"""Defaults of request fields that depend on the worker's flags."""

from __future__ import annotations

from mla_router.worker.config import WorkerConfig
from mla_router.worker.server.schema.fields import OpenAIFields, StreamOptions


def fill_in(body: OpenAIFields, config: WorkerConfig) -> None:
    """Sets the fields of `body` that the flags decide."""
    if body.return_tokens_as_token_ids is None:
        body.return_tokens_as_token_ids = config.return_tokens_as_token_ids
    if not body.stream:
        return
    if config.enable_force_include_usage:
        body.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    elif config.stream_response_default_include_usage and body.stream_options is None:
        body.stream_options = StreamOptions(include_usage=True)
