"""The backend of each kind of attention that a model has: the first candidate that supports it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mla_router.worker.config import ConfigError
from mla_router.worker.engine.attention.flashinfer import FlashInferBackend
from mla_router.worker.engine.attention.flashinfer_mla import FLAG as FLASHINFER_MLA
from mla_router.worker.engine.attention.flashinfer_mla import FlashInferMlaBackend
from mla_router.worker.engine.attention.layout import AttentionBackend
from mla_router.worker.engine.attention.model_attention import ModelAttention
from mla_router.worker.engine.attention.torch import TorchBackend
from mla_router.worker.engine.attention.triton import TritonBackend
from mla_router.worker.model.config.attention_spec import AttentionSpec
from mla_router.worker.model.config.base import ModelConfig

logger = logging.getLogger(__name__)

# Of queries. FlashInfer's decode pads to so many; from there on it takes half of our kernel's time, and
# what its prefill saves is more than its concatenated keys cost.
_FLASHINFER_HEADS = 64


class Candidate(NamedTuple):
    """A backend, or FlashInfer's decode beside its prefill."""

    backend: type[TorchBackend | TritonBackend | FlashInferBackend]
    flashinfer_mla: bool = False

    def obstacle(self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        """A flag, and the reason why it cannot serve; None if both parts can."""
        if self.flashinfer_mla and (reason := FlashInferMlaBackend.supports(spec, device, dtype)):
            return f"{FLASHINFER_MLA}: {reason}"
        if reason := self.backend.supports(spec, device, dtype):
            return f"--attention-backend {self.backend.name}: {reason}"
        return None

    def build(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype
    ) -> AttentionBackend:
        backend = self.backend(spec, device, dtype)
        return (
            FlashInferMlaBackend(backend, spec, device, dtype) if self.flashinfer_mla else backend
        )


def choose_attention(
    wanted: str,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    flashinfer_mla: bool = False,
) -> ModelAttention:
    """`wanted` is the value of --attention-backend, `flashinfer_mla` that of --enable-flashinfer-mla.
    Raises ConfigError if they cannot serve."""
    backends = []
    for spec in model.attention_specs:
        candidates = _candidates(wanted, spec, flashinfer_mla)
        backends.append(_first_that_serves(candidates, spec, device, dtype))
    attention = ModelAttention(backends)
    logger.info("Attention backend: %s", attention.name)
    return attention


def _candidates(wanted: str, spec: AttentionSpec, flashinfer_mla: bool) -> list[Candidate]:
    """In order of preference."""
    named = {kind.name: kind for kind in (FlashInferBackend, TritonBackend, TorchBackend)}
    if wanted != "auto":
        return [Candidate(named[wanted], flashinfer_mla)]
    many_heads = spec.num_heads >= _FLASHINFER_HEADS
    return [
        *([Candidate(FlashInferBackend, flashinfer_mla=True)] if many_heads else []),
        Candidate(TritonBackend, flashinfer_mla),
        Candidate(TorchBackend, flashinfer_mla),
    ]


def _first_that_serves(
    candidates: Sequence[Candidate], spec: AttentionSpec, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    obstacles: list[str] = []
    for candidate in candidates:
        obstacle = candidate.obstacle(spec, device, dtype)
        if obstacle is None:
            for passed_over in obstacles:
                logger.info("Not used for attention: %s", passed_over)
            return candidate.build(spec, device, dtype)
        obstacles.append(obstacle)
    raise ConfigError("; ".join(dict.fromkeys(obstacles)))
