"""Reasons for which several backends cannot serve a spec, as words after the name of a flag."""

from __future__ import annotations

import torch

from mla_router.worker.model.config.attention_spec import AttentionSpec


def full_attention_reason(spec: AttentionSpec) -> str | None:
    """Returns the reason of kernels without sliding windows and soft caps, or None."""
    if spec.window is not None:
        return f"has no sliding windows, and a layer has one of {spec.window} tokens"
    if spec.softcap is not None:
        return f"has no capped scores, and a layer caps them at {spec.softcap}"
    return None


def gpu_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns the reason of kernels for 16-bit models on a GPU, or None."""
    if device.type != "cuda":
        return f"needs a GPU, not device {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs a dtype of 16 bits, not {dtype}"
    return None


def same_dtype_reason(dtype: torch.dtype, kv_cache_dtype: torch.dtype) -> str | None:
    """Returns the reason of kernels without FP8 caches, or None."""
    if kv_cache_dtype == dtype:
        return None
    name = str(kv_cache_dtype).removeprefix("torch.")
    return f"needs a KV cache of the model's dtype, not {name} (--kv-cache-dtype)"
