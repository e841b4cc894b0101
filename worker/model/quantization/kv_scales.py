"""The scales of an FP8 KV cache in a checkpoint: `self_attn.k_scale` and `self_attn.v_scale` of each layer.

Checkpoints have them if their quantization_config has a kv_cache_scheme. They are used if --kv-cache-dtype is FP8.
"""

from __future__ import annotations

import torch
from torch import nn

from mla_router.worker.kernels.kv_cache.fp8 import KVScales
from mla_router.worker.model.decoder import AttentionLayer
from mla_router.worker.model.linear import empty_parameter

NAMES = "k_scale", "v_scale"


def declare_kv_scales(model: nn.Module) -> None:
    """Gives each attention layer of `model` the parameters that the checkpoint has."""
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            for name in NAMES:
                module.register_parameter(name, empty_parameter(1, 1, dtype=torch.float32))


def read_kv_scales(model: nn.Module) -> None:
    """Sets `kv_scales` of each attention layer to the loaded parameters, if there are any."""
    for module in model.modules():
        if isinstance(module, AttentionLayer) and hasattr(module, NAMES[0]):
            keys, values = (float(getattr(module, name)) for name in NAMES)
            module.kv_scales = KVScales(keys, values)
