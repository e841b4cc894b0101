"""Quantized weights with random values, their numbers in float64, and models whose activations are not quantized."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mla_router.worker.kernels.quantize import quantize_rows_torch, quantize_rows_triton
from mla_router.worker.kernels.quantized_linear import for_library
from mla_router.worker.kernels.weight import Activations, Quantized, RowForm, Weight
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.linear import Linear
from mla_router.worker.model.quantization.block_scaled import BlockScaled

LARGEST = {torch.float8_e4m3fn: 448, torch.int8: 127}
# Quantized alone, and beside the plain rows
FORMS = [
    RowForm(False, torch.float8_e4m3fn),
    RowForm(True, torch.float8_e4m3fn),
    RowForm(False, torch.int8),
]


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
    return for_library(Weight(values.to(dtype), scales * 1e-3 + 1e-4, block, constant=True))


def numbers(weight: Weight) -> Tensor:
    """Returns values times scales in float64, by repeating each scale."""
    assert weight.scales is not None
    rows, columns = weight.values.shape[-2:]
    scales = weight.scales.double()
    scales = scales.repeat_interleave(weight.block[0], -2)[..., :rows, :]
    scales = scales.repeat_interleave(weight.block[1], -1)[..., :columns]
    return weight.values.double() * scales


def rounded(x: Tensor, dtype: torch.dtype, group: int = 128) -> Tensor:
    """Returns the numbers [T, K] in float64 for which the quantized rows of x stand."""
    rows = quantize_rows_torch(x, dtype, group)
    return rows.values.double() * rows.scales.double().repeat_interleave(group, 1)[:, : x.shape[1]]


def weight_only(model: CausalLM) -> CausalLM:
    """Stops the products of `model` from quantizing activations, to compare its weights with plain ones. Returns `model`."""
    for layer in model.modules():
        if isinstance(layer, Linear) and isinstance(layer.format, BlockScaled):
            layer.format = replace(layer.format, weight_only=True)
    return model


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def assert_in_form(got: Activations, plain: Tensor, form: RowForm) -> None:
    """Raises AssertionError unless `got` is `plain` in `form`, bit for bit as from the quantizer's own launch."""
    assert isinstance(got, Quantized) and form.quantized is not None
    expected = quantize_rows_triton(plain, form.quantized)
    assert (got.group, got.dtype) == (expected.group, expected.dtype)
    assert (got.plain is not None) == form.plain
    if got.plain is not None:
        assert torch.equal(got.plain.view(torch.int16), plain.view(torch.int16))
    assert got.values.dtype == form.quantized
    assert torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(got.scales.view(torch.int32), expected.scales.view(torch.int32))
