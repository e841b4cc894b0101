"""Quantized weights with random values, and their numbers in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.weight import Weight

LARGEST = {torch.float8_e4m3fn: 448, torch.int8: 127}


def drawn_weight(
    *sizes: int,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] = (128, 128),
    device: str = "cpu",
    seed: int = 0,
) -> Weight:
    """Returns a constant weight [..., N, K]; `block` (1, K) has a scale for each row."""
    draw = torch.Generator(device).manual_seed(seed)
    values = torch.randn(sizes, generator=draw, device=device) * (LARGEST[dtype] / 4)
    values = values.clamp(-LARGEST[dtype], LARGEST[dtype])
    scales = torch.rand(
        *sizes[:-2],
        -(-sizes[-2] // block[0]),
        -(-sizes[-1] // block[1]),
        generator=draw,
        device=device,
    )
    return Weight(values.to(dtype), scales * 1e-3 + 1e-4, block, constant=True)


def numbers(weight: Weight) -> Tensor:
    """Returns values times scales in float64, by repeating each scale."""
    assert weight.scales is not None
    rows, columns = weight.values.shape[-2:]
    scales = weight.scales.double()
    scales = scales.repeat_interleave(weight.block[0], -2)[..., :rows, :]
    scales = scales.repeat_interleave(weight.block[1], -1)[..., :columns]
    return weight.values.double() * scales


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())
