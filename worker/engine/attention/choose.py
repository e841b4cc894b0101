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
from mla_router.worker.model.config.llama import LlamaConfig
from mla_router.worker.model.rope import softmax_scale

logger = logging.getLogger(__name__)

# Of a key or value of one head: wider ones leave no room for several tiles on a multiprocessor
_MAX_HEAD_WIDTH = 256


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
    obstacle = _device_obstacle(device, dtype) or _model_obstacle(model)
    if wanted in ("triton", "flashinfer") and obstacle:
        raise ConfigError(f"--attention-backend {wanted}: cannot serve {obstacle}")
    if flashinfer_mla and obstacle:
        raise ConfigError(f"{FLASHINFER_MLA}: cannot serve {obstacle}")
    backend: AttentionBackend = TorchBackend()
    if not obstacle:
        match model:
            case DeepseekConfig():
                backend = _for_latents(wanted, flashinfer_mla, model, device, dtype)
            case LlamaConfig():
                backend = _for_key_heads(wanted, flashinfer_mla, model, device)
    logger.info("Attention backend: %s%s", backend.name, f", for {obstacle}" if obstacle else "")
    return backend


def _for_latents(
    wanted: str,
    flashinfer_mla: bool,
    model: DeepseekConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> AttentionBackend:
    backend: AttentionBackend = TorchBackend()
    if wanted != "torch":
        ours = TritonBackend.for_latents(
            model.num_heads, model.qk_nope_head_dim + model.v_head_dim, device
        )
        backend = ours
        if wanted == "flashinfer":
            backend = FlashInferBackend(
                ours, model.num_heads, model.qk_head_dim, model.v_head_dim, dtype, device
            )
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
    return backend


def _for_key_heads(
    wanted: str, flashinfer_mla: bool, model: LlamaConfig, device: torch.device
) -> AttentionBackend:
    for flag, given in (
        ("--attention-backend flashinfer", wanted == "flashinfer"),
        (FLASHINFER_MLA, flashinfer_mla),
    ):
        if given:
            raise ConfigError(
                f"{flag}: cannot serve {model.architecture}, whose attention is not latent"
            )
    if wanted == "torch":
        return TorchBackend()
    return TritonBackend.for_key_heads(
        model.num_heads, model.num_kv_heads, 2 * model.head_dim, device
    )


def _device_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why our kernels, which FlashInfer's backends use as well, are not for it."""
    if device.type != "cuda":
        return f"device {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"numbers of {dtype}, which have not 16 bits"
    return None


def _model_obstacle(model: ModelConfig) -> str | None:
    match model:
        case DeepseekConfig():
            for name in ("kv_lora_rank", "qk_rope_head_dim"):
                width = getattr(model, name)
                if width < 16 or width & (width - 1):
                    return f"{name} {width}, which is no power of two from 16 on"
            return None
        case LlamaConfig():
            wide = model.head_dim > _MAX_HEAD_WIDTH
            return f"head_dim {model.head_dim}, which is over {_MAX_HEAD_WIDTH}" if wide else None
    return f"{model.architecture}, for which there are none"
