"""The attention of a model by a given backend."""

from __future__ import annotations

import torch

from mla_router.worker.engine.attention.model_attention import ModelAttention
from mla_router.worker.engine.attention.torch import TorchBackend
from mla_router.worker.engine.attention.triton import TritonBackend
from mla_router.worker.model.config.base import ModelConfig

CPU = torch.device("cpu")


def torch_attention(config: ModelConfig) -> ModelAttention:
    """Returns the torch backend, for any device and dtype."""
    return ModelAttention(
        [TorchBackend(spec, CPU, torch.float32, torch.float32) for spec in config.attention_specs],
        [spec.window is not None for spec in config.attention_specs],
    )


def triton_attention(
    config: ModelConfig, device: torch.device = CPU, kv_cache_dtype: torch.dtype = torch.bfloat16
) -> ModelAttention:
    """Returns the Triton backend, for a CPU as well, where each op uses its torch form."""
    specs = config.attention_specs
    return ModelAttention(
        [TritonBackend(spec, device, torch.bfloat16, kv_cache_dtype) for spec in specs],
        [spec.window is not None for spec in specs],
    )
