"""Random weights (--load-format dummy), for timing a model without its files.

The values keep activations near 1: logits are finite, and tokens spread over the experts. A
model with tied embeddings mostly repeats its last token.
"""

from __future__ import annotations

import logging
import zlib

import torch
from torch import nn

from mla_router.worker.model.layers import Embedding, RMSNorm
from mla_router.worker.model.linear import Linear
from mla_router.worker.model.weight_mapping import places

logger = logging.getLogger(__name__)


def fill_dummy(model: nn.Module) -> None:
    """Fills every parameter of `model`: norms with 1, biases with 0, embeddings from N(0, 1) and weights from
    N(0, 1 / inputs). The values of a tensor follow from its name in checkpoints: they are the same each time on the
    same kind of device, and the ranks of a group hold pieces of one model."""
    generator = torch.Generator(next(model.parameters()).device)

    def seeded(name: str) -> torch.Generator:
        return generator.manual_seed(zlib.crc32(name.encode()))

    for path, module in model.named_modules():
        if isinstance(module, Linear):
            for name, of_layer in places(path, module).items():
                module.format.fill_random(of_layer, seeded(name))
            if module.bias is not None:
                module.bias.zero_()
            continue
        seeded(path)
        for parameter in module.parameters(recurse=False):
            if isinstance(module, (RMSNorm, nn.LayerNorm)) and parameter is module.weight:
                parameter.fill_(1.0)
            elif parameter.ndim == 1:
                parameter.zero_()
            elif isinstance(module, Embedding):
                parameter.normal_(generator=generator)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    total = sum(parameter.nbytes for parameter in model.parameters())
    logger.warning("The weights are random (--load-format dummy): %.3f GB", total / 1e9)
