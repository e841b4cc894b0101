"""Selects the backend of each `AttentionSpec` of a model: the first candidate that supports it."""

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

# Query heads from which FlashInfer's prefill is preferred: it then saves more than the concatenation of its keys costs.
# Its decode takes as long as ours there, and its plan takes the host's time.
_FLASHINFER_HEADS = 64


class Asked(NamedTuple):
    """The arguments of `AttentionBackend.supports`."""

    spec: AttentionSpec
    device: torch.device
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype


class Candidate(NamedTuple):
    """A backend, or its prefill with FlashInfer's decode."""

    backend: type[TorchBackend | TritonBackend | FlashInferBackend]
    flashinfer_mla: bool = False

    def obstacle(self, asked: Asked) -> str | None:
        """Returns the flag and the reason for which this candidate cannot serve; None if it can."""
        if self.flashinfer_mla and (reason := FlashInferMlaBackend.supports(*asked)):
            return f"{FLASHINFER_MLA}: {reason}"
        if reason := self.backend.supports(*asked):
            return f"--attention-backend {self.backend.name}: {reason}"
        return None

    def build(self, asked: Asked) -> AttentionBackend:
        backend = self.backend(*asked)
        if not self.flashinfer_mla:
            return backend
        return FlashInferMlaBackend(backend, asked.spec, asked.device, asked.dtype)


def choose_attention(
    wanted: str,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    flashinfer_mla: bool = False,
    kv_cache_dtype: torch.dtype | None = None,
    with_trees: bool = False,
) -> ModelAttention:
    """Returns the backends of `model`. `wanted`: --attention-backend; `flashinfer_mla`: --enable-flashinfer-mla;
    `kv_cache_dtype`: by default `dtype`; `with_trees`: drafts are trees. Raises ConfigError if these backends cannot
    serve the model."""
    backends = []
    for spec in model.attention_specs:
        candidates = _candidates(wanted, spec, flashinfer_mla, with_trees=with_trees)
        asked = Asked(spec, device, dtype, kv_cache_dtype or dtype)
        backends.append(_first_that_serves(candidates, asked))
    attention = ModelAttention(
        backends, [spec.window is not None for spec in model.attention_specs]
    )
    logger.info("Attention backend: %s", attention.name)
    return attention


def _candidates(
    wanted: str, spec: AttentionSpec, flashinfer_mla: bool, *, with_trees: bool
) -> list[Candidate]:
    """Returns the candidates in order of preference. FlashInfer has no trees."""
    named = {kind.name: kind for kind in (FlashInferBackend, TritonBackend, TorchBackend)}
    if wanted != "auto":
        return [Candidate(named[wanted], flashinfer_mla)]
    candidates = [Candidate(TritonBackend, flashinfer_mla), Candidate(TorchBackend, flashinfer_mla)]
    if spec.num_heads >= _FLASHINFER_HEADS and not with_trees:
        candidates.insert(0, Candidate(FlashInferBackend, flashinfer_mla))
    return candidates


def _first_that_serves(candidates: Sequence[Candidate], asked: Asked) -> AttentionBackend:
    obstacles: list[str] = []
    for candidate in candidates:
        obstacle = candidate.obstacle(asked)
        if obstacle is None:
            if asked.device.type != "cpu":
                for passed_over in obstacles:
                    logger.info("Not used for attention: %s", passed_over)
            return candidate.build(asked)
        obstacles.append(obstacle)
    raise ConfigError("; ".join(dict.fromkeys(obstacles)))
