"""The gated activation of SwiGLU feed-forward layers (Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous

# Columns of a program: 16 bytes of bfloat16 of each half for each of its 128 threads.
_BLOCK = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, [..., I], for gate_up [..., 2I] with gate and up side by side in the last axis. silu(gate)
    is rounded to their dtype before the product."""
    return silu_and_mul_triton(gate_up) if on_gpu(gate_up) else silu_and_mul_torch(gate_up)


def silu_and_mul_torch(gate_up: Tensor) -> Tensor:
    assert gate_up.shape[-1] % 2 == 0, f"gate_up {tuple(gate_up.shape)} needs an even last axis"
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_and_mul_triton(gate_up: Tensor, *, num_warps: int = 4) -> Tensor:
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    assert rows.shape[1] % 2 == 0 and rows.stride(1) == 1, (
        f"gate_up {tuple(gate_up.shape)} {gate_up.stride()} needs an even, contiguous last axis"
    )
    width = rows.shape[1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_and_mul_kernel[(len(rows), triton.cdiv(width, _BLOCK))](
        rows,
        out,
        rows.stride(0),
        I=width,
        BLOCK=_BLOCK,
        num_warps=num_warps,
        **launch_options(),
    )
    return out


@triton.jit
def _silu_and_mul_kernel(gate_up, out, stride, I: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < I
    gate = tl.load(gate_up + row * stride + column, inside, other=0.0)
    up = tl.load(gate_up + row * stride + I + column, inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * I + column, (activated * up.to(tl.float32)).to(gate.dtype), inside)
