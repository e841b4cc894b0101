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
from mla_router.worker.kv_cache.spec import HeadsSpec, KVCacheSpec, LatentSpec
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.rope import softmax_scale

logger = logging.getLogger(__name__)

# Of a key or value of one head: wider ones leave no room for several tiles on a multiprocessor
_MAX_HEAD_WIDTH = 256
# Of queries. FlashInfer's decode pads to so many; from there on it takes half of our kernel's time, and
# what its prefill saves is more than its concatenated keys cost.
_FLASHINFER_HEADS = 64


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
    rows = model.kv_cache_spec(0, dtype)
    obstacle = _device_obstacle(device, dtype) or _rows_obstacle(rows)
    not_latent = None
    if isinstance(rows, HeadsSpec):
        not_latent = f"{model.architecture}, whose KV cache has no latents"
    for flag, given, reason in (
        ("--attention-backend triton", wanted == "triton", obstacle),
        ("--attention-backend flashinfer", wanted == "flashinfer", obstacle or not_latent),
        (FLASHINFER_MLA, flashinfer_mla, obstacle or not_latent),
    ):
        if given and reason:
            raise ConfigError(f"{flag}: cannot serve {reason}")
    backend: AttentionBackend = TorchBackend()
    if not obstacle and isinstance(rows, LatentSpec):
        assert isinstance(model, DeepseekConfig), model.architecture
        if wanted == "auto" and model.num_heads >= _FLASHINFER_HEADS:
            backend = _for_many_heads(model, device, dtype, flashinfer_mla)
        else:
            backend = _for_latents(wanted, model, device, dtype, flashinfer_mla)
    elif not obstacle and isinstance(rows, HeadsSpec) and wanted != "torch":
        backend = TritonBackend.for_key_heads(model.num_heads, rows, device)
    logger.info("Attention backend: %s%s", backend.name, f", for {obstacle}" if obstacle else "")
    return backend


def _for_many_heads(
    model: DeepseekConfig, device: torch.device, dtype: torch.dtype, flashinfer_mla: bool
) -> AttentionBackend:
    """FlashInfer's kernels for prefill and decode, if they can be had."""
    try:
        return _for_latents("flashinfer", model, device, dtype, flashinfer_mla=True)
    except ConfigError as error:
        logger.info("Without FlashInfer, which is faster for %d heads: %s", model.num_heads, error)
        return _for_latents("triton", model, device, dtype, flashinfer_mla)


def _for_latents(
    wanted: str,
    model: DeepseekConfig,
    device: torch.device,
    dtype: torch.dtype,
    flashinfer_mla: bool,
) -> AttentionBackend:
    backend = _prefill_of_latents(wanted, model, device, dtype)
    if not flashinfer_mla:
        return backend
    return FlashInferMlaBackend(
        backend,
        model.num_heads,
        model.kv_lora_rank,
        model.qk_rope_head_dim,
        softmax_scale(model.qk_head_dim, model.rope),
        dtype,
        device,
    )


def _prefill_of_latents(
    wanted: str, model: DeepseekConfig, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    if wanted == "torch":
        return TorchBackend()
    expanded = model.qk_nope_head_dim + model.v_head_dim
    ours = TritonBackend.for_latents(model.num_heads, expanded, device)
    if wanted == "flashinfer":
        widths = model.qk_head_dim, model.v_head_dim
        return FlashInferBackend(ours, model.num_heads, *widths, dtype, device)
    return ours


def _device_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why our kernels, which FlashInfer's backends use as well, are not for it."""
    if device.type != "cuda":
        return f"device {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"numbers of {dtype}, which have not 16 bits"
    return None


def _rows_obstacle(rows: KVCacheSpec) -> str | None:
    match rows:
        case LatentSpec():
            for name, width in (
                ("kv_lora_rank", rows.kv_lora_rank),
                ("qk_rope_head_dim", rows.qk_rope_head_dim),
            ):
                if width < 16 or width & (width - 1):
                    return f"{name} {width}, which is no power of two from 16 on"
        case HeadsSpec():
            width = max(rows.head_dim, rows.v_head_dim)
            if width > _MAX_HEAD_WIDTH:
                return f"heads {width} wide, which is over {_MAX_HEAD_WIDTH}"
    return None
