"""The gated activation of SwiGLU feed-forward layers (Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

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


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, [..., I], for gate_up [..., 2I] with gate and up side by side in the last axis. silu(gate)
    is rounded to their dtype before the product."""
    return silu_and_mul_triton(gate_up) if on_gpu(gate_up) else silu_and_mul_torch(gate_up)


def gated_rows(gate_up: Tensor, form: RowForm) -> Activations:
    """Returns `silu_and_mul` of gate_up [T, 2I] in `form`."""
    if on_gpu(gate_up):
        return gated_rows_triton(gate_up, form)
    return in_form(silu_and_mul_torch(gate_up), form)


def silu_and_mul_torch(gate_up: Tensor) -> Tensor:
    assert gate_up.shape[-1] % 2 == 0, f"gate_up {tuple(gate_up.shape)} needs an even last axis"
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_and_mul_triton(gate_up: Tensor, *, num_warps: int = 4) -> Tensor:
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    out = dense_rows(gated_rows_triton(rows, PLAIN_ROWS, num_warps=num_warps))
    return out.view(*gate_up.shape[:-1], out.shape[1])


def gated_rows_triton(gate_up: Tensor, form: RowForm, *, num_warps: int = 4) -> Activations:
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
        BLOCK=_BLOCK,
        num_warps=num_warps,
        **launch_options(),
    )
    rows = out if quantized is None else quantized
    assert rows is not None, f"{form}"
    return rows


@triton.jit(do_not_specialize=["group_stride"])
def _silu_and_mul_kernel(
    gate_up, out, quantized, scales, stride, group_stride, I: tl.constexpr, BLOCK: tl.constexpr
):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < I
    gate = tl.load(gate_up + row * stride + column, inside, other=0.0)
    up = tl.load(gate_up + row * stride + I + column, inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    result = (activated * up.to(tl.float32)).to(gate.dtype)
    if out is not None:
        tl.store(out + row * I + column, result, inside)
    if quantized is not None:
        first = tl.program_id(1) * BLOCK
        store_quantized(result, first, quantized, scales, row, group_stride, True, I)
