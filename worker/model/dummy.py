"""Random weights in the shapes of a real model, for trying and timing it without its files.

Values keep the activations near 1 everywhere: logits are finite, and tokens spread over the experts. A
model whose head is its embedding mostly repeats its last token.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from mla_router.worker.model.layers import Embedding, RMSNorm
from mla_router.worker.model.quantization.fp8 import Fp8Linear

logger = logging.getLogger(__name__)

SEED = 0
FP8_DEVIATION = (
    64.0  # of float8_e4m3fn, whose largest is 448: uses most of its range, clips nothing
)


def fill_dummy(model: nn.Module) -> None:
    """Fill every parameter of `model`, the same ones each time on the same kind of device: norms with 1,
    biases with 0, embeddings from N(0, 1) and weights from N(0, 1 / inputs)."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(SEED)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
            elif parameter.ndim == 1:
                parameter.zero_()
            elif isinstance(module, Embedding):
                parameter.normal_(generator=generator)
            elif isinstance(module, Fp8Linear) and name == module.scale_name:
                parameter.fill_(module.inputs**-0.5 / FP8_DEVIATION)
            elif parameter.dtype == torch.float8_e4m3fn:
                _draw_fp8(parameter, generator)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    total = sum(parameter.nbytes for parameter in model.parameters())
    logger.warning("The weights are random (--load-format dummy): %.3f GB", total / 1e9)


def _draw_fp8(parameter: Tensor, generator: torch.Generator) -> None:
    """One expert at a time: torch draws no FP8, and all of them in float32 would take four times the
    memory."""
    for matrix in parameter if parameter.ndim == 3 else [parameter]:
        values = torch.empty(matrix.shape, dtype=torch.float32, device=matrix.device)
        matrix.copy_(values.normal_(std=FP8_DEVIATION, generator=generator))
