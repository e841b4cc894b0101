"""The gated activations of feed-forward layers: SwiGLU's, and GEGLU's (Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

import math
from typing import Literal

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.kernels.quantize import empty_rows, in_form, store_quantized
from mla_router.worker.kernels.weight import PLAIN_ROWS, Activations, RowForm, dense_rows

# Columns of a program: 16 bytes of bfloat16 of each half for each of its 128 threads.
_BLOCK = 1024

# "gelu_tanh" is GELU's approximation by a tanh (Hendrycks and Gimpel, 2016, arXiv:1606.08415).
Activation = Literal["silu", "gelu_tanh"]
# 0.5 * (1 + tanh(u)) = 1 / (1 + exp(-2u)), with u = sqrt(2 / pi) * (x + 0.044715 x^3)
_TWICE = tl.constexpr(2 * math.sqrt(2 / math.pi))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, [..., I], for gate_up [..., 2I] with gate and up side by side in the last axis. silu(gate)
    is rounded to their dtype before the product."""
    return silu_and_mul_triton(gate_up) if on_gpu(gate_up) else silu_and_mul_torch(gate_up)


def gated_rows(gate_up: Tensor, form: RowForm, activation: Activation = "silu") -> Activations:
    """Returns activation(gate) * up of gate_up [T, 2I] in `form`, as `silu_and_mul`."""
    if on_gpu(gate_up):
        return gated_rows_triton(gate_up, form, activation)
    return in_form(gated_torch(gate_up, activation), form)


def silu_and_mul_torch(gate_up: Tensor) -> Tensor:
    return gated_torch(gate_up, "silu")


def gated_torch(gate_up: Tensor, activation: Activation) -> Tensor:
    assert gate_up.shape[-1] % 2 == 0, f"gate_up {tuple(gate_up.shape)} needs an even last axis"
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh") * up


def silu_and_mul_triton(gate_up: Tensor, *, num_warps: int = 4) -> Tensor:
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    out = dense_rows(gated_rows_triton(rows, PLAIN_ROWS, num_warps=num_warps))
    return out.view(*gate_up.shape[:-1], out.shape[1])


def gated_rows_triton(
    gate_up: Tensor, form: RowForm, activation: Activation = "silu", *, num_warps: int = 4
) -> Activations:
    assert gate_up.shape[1] % 2 == 0 and gate_up.stride(1) == 1, (
        f"gate_up {tuple(gate_up.shape)} {gate_up.stride()} needs an even, contiguous last axis"
    )
    width = gate_up.shape[1] // 2
    out, quantized = empty_rows(gate_up, width, form)
    _silu_and_mul_kernel[(len(gate_up), triton.cdiv(width, _BLOCK))](
        gate_up,
        out,
        quantized and quantized.values,
        quantized and quantized.scales,
        gate_up.stride(0),
        quantized.scales.stride(1) if quantized else 0,
        I=width,
        GELU=activation == "gelu_tanh",
        BLOCK=_BLOCK,
        num_warps=num_warps,
        **launch_options(),
    )
    rows = out if quantized is None else quantized
    assert rows is not None, f"{form}"
    return rows


@triton.jit(do_not_specialize=["group_stride"])
def _silu_and_mul_kernel(
    gate_up,
    out,
    quantized,
    scales,
    stride,
    group_stride,
    I: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < I
    gate = tl.load(gate_up + row * stride + column, inside, other=0.0)
    up = tl.load(gate_up + row * stride + I + column, inside, other=0.0)
    wide = gate.to(tl.float32)
    exponent = _TWICE * (wide + 0.044715 * wide * wide * wide) if GELU else wide
    activated = (wide / (1 + tl.exp(-exponent))).to(gate.dtype).to(tl.float32)
    result = (activated * up.to(tl.float32)).to(gate.dtype)
    if out is not None:
        tl.store(out + row * I + column, result, inside)
    if quantized is not None:
        first = tl.program_id(1) * BLOCK
        store_quantized(result, first, quantized, scales, row, group_stride, True, I)
