"""The scales of an FP8 KV cache in a checkpoint, next to the projections of each attention layer.

compressed-tensors' checkpoints with a kv_cache_scheme have `self_attn.k_scale` and `self_attn.v_scale`. AutoFP8's may
have these, or the older `self_attn.kv_scale` for both, and do not say so in their config. Scales are used if
--kv-cache-dtype is FP8. Latents use the scale of keys.
"""

from __future__ import annotations

from torch import Tensor, nn

from mla_router.worker.kernels.kv_cache.fp8 import KVScales
from mla_router.worker.model.decoder import AttentionLayer
from mla_router.worker.model.shard import Mistake, Shard, scale_mistake

KEYS, VALUES, BOTH = "k_scale", "v_scale", "kv_scale"


class KVScale(Shard):
    """One number of an attention layer."""

    def __init__(self, *, is_needed: bool) -> None:
        self.is_needed = is_needed
        self.value: float | None = None

    def fill(self, tensor: Tensor) -> Mistake | None:
        mistake = scale_mistake(tensor, (1, 1))
        if mistake is None:
            self.value = float(tensor)
        return mistake


def declare_kv_scales(model: nn.Module, *, are_needed: bool) -> None:
    """Gives each attention layer of `model` the scales that the checkpoint has, or may have."""
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            names = (KEYS, VALUES) if are_needed else (KEYS, VALUES, BOTH)
            module.kv_scale_shards = {name: KVScale(is_needed=are_needed) for name in names}


def read_kv_scales(model: nn.Module) -> None:
    """Sets `kv_scales` of each attention layer to the loaded scales, if there are any. A scale alone is that of keys and
    values, as in vLLM and SGLang."""
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            found = {
                name: shard.value
                for name, shard in module.kv_scale_shards.items()
                if isinstance(shard, KVScale) and shard.value is not None
            }
            if found:
                any_scale = found.get(BOTH) or next(iter(found.values()))
                module.kv_scales = KVScales(
                    found.get(KEYS, any_scale), found.get(VALUES, any_scale)
                )
