"""Which backend serves a model on a device."""

from __future__ import annotations

import logging

import torch

from mla_router.worker.config import ConfigError
from mla_router.worker.engine.attention.flashinfer import FlashInferBackend
from mla_router.worker.engine.attention.layout import AttentionBackend
from mla_router.worker.engine.attention.torch import TorchBackend
from mla_router.worker.engine.attention.triton import TritonBackend
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.deepseek import DeepseekConfig

logger = logging.getLogger(__name__)


def choose_attention(
    wanted: str, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """`wanted` is the value of --attention-backend. Raises ConfigError if that cannot serve."""
    obstacle = _obstacle(model, device, dtype)
    if wanted in ("triton", "flashinfer") and obstacle:
        raise ConfigError(f"--attention-backend {wanted}: cannot serve {obstacle}")
    if wanted == "torch" or not isinstance(model, DeepseekConfig) or obstacle:
        logger.info("Attention backend: torch%s", f", for {obstacle}" if obstacle else "")
        return TorchBackend()
    logger.info("Attention backend: %s", "triton" if wanted == "auto" else wanted)
    if wanted == "flashinfer":
        return FlashInferBackend(
            model.num_heads,
            model.qk_head_dim,
            model.qk_rope_head_dim,
            model.v_head_dim,
            dtype,
            device,
        )
    return TritonBackend(model.num_heads, model.qk_nope_head_dim + model.v_head_dim, device)


def _obstacle(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why our kernels, which FlashInfer's backend uses as well, are not for it."""
    if device.type != "cuda":
        return f"device {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"numbers of {dtype}, which have not 16 bits"
    if not isinstance(model, DeepseekConfig):
        return f"{model.architecture}, whose attention is not latent"
    for name in ("kv_lora_rank", "qk_rope_head_dim"):
        width = getattr(model, name)
        if width < 16 or width & (width - 1):
            return f"{name} {width}, which is no power of two from 16 on"
    return None
