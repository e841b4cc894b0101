"""Random weights (--load-format dummy), for timing a model without its files.

The values keep activations near 1: logits are finite, and tokens spread over the experts. A
model with tied embeddings mostly repeats its last token.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from mla_router.worker.model.decoder import AttentionLayer
from mla_router.worker.model.layers import Embedding, RMSNorm
from mla_router.worker.model.linear import Linear

logger = logging.getLogger(__name__)

SEED = 0


def fill_dummy(model: nn.Module) -> None:
    """Fills every parameter of `model`: norms with 1, biases with 0, embeddings from N(0, 1) and weights from
    N(0, 1 / inputs). The values are the same each time on the same kind of device."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(SEED)
    for module in model.modules():
        if isinstance(module, Linear):
            module.format.fill_random(module, generator)
            if module.bias is not None:
                module.bias.zero_()
            continue
        for parameter in module.parameters(recurse=False):
            if isinstance(module, (RMSNorm, AttentionLayer)):  # a layer's scales of its KV cache
                parameter.fill_(1.0)
            elif parameter.ndim == 1:
                parameter.zero_()
            elif isinstance(module, Embedding):
                parameter.normal_(generator=generator)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    total = sum(parameter.nbytes for parameter in model.parameters())
    logger.warning("The weights are random (--load-format dummy): %.3f GB", total / 1e9)
