"""Chooses the weight format of each linear layer of a model."""

from __future__ import annotations

import logging

import torch
from torch import nn

from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.linear import Linear, WeightFormat
from mla_router.worker.model.quantization.block_scaled import BlockScaled
from mla_router.worker.model.quantization.kv_scales import declare_kv_scales
from mla_router.worker.model.quantization.online import OnlineBlockScaled
from mla_router.worker.model.quantization.spec import Quantization
from mla_router.worker.model.weight_mapping import checkpoint_layers

logger = logging.getLogger(__name__)

# No published checkpoint quantizes these two layers, although DeepSeek's configs do not exclude them.
NEVER_QUANTIZED = ("lm_head", "eh_proj")


def weight_format(quantization: Quantization) -> WeightFormat:
    """Returns the format of quantized layers."""
    dtype = getattr(torch, quantization.dtype)
    kind = OnlineBlockScaled if quantization.online else BlockScaled
    return kind(dtype, quantization.scale_name, quantization.block, quantization.weight_only)


def quantize(model: nn.Module, quantization: Quantization) -> None:
    """Sets the format of the linear layers that are quantized. Norms, embeddings, gates and the head stay plain; if the
    checkpoint is plain, so do weights that may be dequantized after loading. Must run before parameters have memory.
    Raises ModelError."""
    if quantization.kv_scales is not None:
        declare_kv_scales(model, are_needed=quantization.kv_scales == "needed")
    quantized = weight_format(quantization)
    logger.info(
        "Linear weights: %s, %s%s%s",
        quantization.method,
        quantization.dtype,
        ", activations not quantized" if quantization.weight_only else "",
        ", quantized while they load" if quantization.online else "",
    )
    for name, linear in model.named_modules():
        if not isinstance(linear, Linear) or name.rpartition(".")[2] in NEVER_QUANTIZED:
            continue
        if quantization.online and linear.keeps_quantized is not None:
            continue
        layers = checkpoint_layers(name, linear)
        ignored = [layer for layer in layers if quantization.ignores(layer)]
        if not ignored:
            linear.set_format(quantized)
        elif len(ignored) < len(layers):
            raise ModelError(
                f"quantization_config: {ignored[0]} is not quantized, but of the others that are "
                f"joined in {name} some are: only all or none is supported"
            )
