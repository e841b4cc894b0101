"""Which backend serves a model on a device."""

from __future__ import annotations

import logging

import torch

from mla_router.worker.config import ConfigError
from mla_router.worker.engine.attention.flashinfer import FlashInferBackend
from mla_router.worker.engine.attention.flashinfer_mla import FLAG as FLASHINFER_MLA
from mla_router.worker.engine.attention.flashinfer_mla import FlashInferMlaBackend
from mla_router.worker.engine.attention.layout import AttentionBackend
from mla_router.worker.engine.attention.torch import TorchBackend
from mla_router.worker.engine.attention.triton import TritonBackend
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.rope import softmax_scale

logger = logging.getLogger(__name__)


def choose_attention(
    wanted: str,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    flashinfer_mla: bool = False,
) -> AttentionBackend:
    """`wanted` is the value of --attention-backend, `flashinfer_mla` that of --enable-flashinfer-mla.
    Raises ConfigError if they cannot serve."""
    obstacle = _obstacle(model, device, dtype)
    if wanted in ("triton", "flashinfer") and obstacle:
        raise ConfigError(f"--attention-backend {wanted}: cannot serve {obstacle}")
    if flashinfer_mla and obstacle:
        raise ConfigError(f"{FLASHINFER_MLA}: cannot serve {obstacle}")
    backend: AttentionBackend
    if obstacle or not isinstance(model, DeepseekConfig):
        backend = TorchBackend()
    else:
        backend = _for_latents(wanted, model, device, dtype)
        if flashinfer_mla:
            backend = FlashInferMlaBackend(
                backend,
                model.num_heads,
                model.kv_lora_rank,
                model.qk_rope_head_dim,
                softmax_scale(model.qk_head_dim, model.rope),
                dtype,
                device,
            )
    logger.info("Attention backend: %s%s", backend.name, f", for {obstacle}" if obstacle else "")
    return backend


def _for_latents(
    wanted: str, model: DeepseekConfig, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    if wanted == "torch":
        return TorchBackend()
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
