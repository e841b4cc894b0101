"""The number of tokens of one request, prompt and output together."""

from __future__ import annotations

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.model.config.base import ModelConfig


def choose_context_length(config: WorkerConfig, model: ModelConfig) -> int:
    """Returns the number of tokens. Raises ConfigError if --context-length exceeds the model's context."""
    length = config.context_length or model.max_position_embeddings
    if length > model.max_position_embeddings:
        raise ConfigError(
            f"--context-length {length}: at most {model.max_position_embeddings}, the model's limit"
        )
    return length
