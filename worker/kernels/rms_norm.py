"""Root mean square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467), alone and with the preceding addition
of the residual.

The mean and the division are in float32 and rounded to x's dtype before the weight is applied, as in training.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last axis, for x [..., N] and weight [N] of one dtype, in x's
    shape and dtype."""
    return rms_norm_triton(x, weight, eps) if on_gpu(x) else rms_norm_torch(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns rms_norm(x + residual) and x + residual, for x and residual [..., N] of one dtype. The sum is rounded to it
    before the norm."""
    add = add_rms_norm_triton if on_gpu(x) else add_rms_norm_torch
    return add(x, residual, weight, eps)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert x.shape[-1:] == weight.shape, f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * inverse_rms).to(x.dtype)


def add_rms_norm_torch(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_torch(total, weight, eps), total


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, *, num_warps: int | None = None
) -> Tensor:
    """Launches a program for each row. `num_warps` replaces `tiling`, for benchmarks."""
    return _launch(x, None, weight, eps, num_warps)[0]


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, num_warps: int | None = None
) -> tuple[Tensor, Tensor]:
    """Launches a program for each row, which keeps the sum in registers for both results."""
    return _launch(x, residual, weight, eps, num_warps)


def tiling(width: int) -> tuple[int, int]:
    """Returns the block, which is the power of 2 that holds a row, and the number of warps: 32 bytes of bfloat16 a
    thread, within 1 and 8 warps."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 512, 1), 8)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, num_warps: int | None
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    rows, others = x.reshape(-1, width), x if residual is None else residual
    others = others.reshape(-1, width)
    assert (
        weight.shape == (width,)
        and rows.shape == others.shape
        and x.dtype == others.dtype == weight.dtype
        and rows.stride(1) == others.stride(1) == weight.stride(0) == 1
    ), (
        f"x {tuple(x.shape)} {x.stride()} {x.dtype}, residual {tuple(others.shape)} "
        f"{others.stride()} {others.dtype}, weight {tuple(weight.shape)} {weight.dtype}"
    )
    block, warps = tiling(width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    _rms_norm_kernel[(len(rows),)](
        rows,
        others,
        weight,
        out,
        total,
        rows.stride(0),
        others.stride(0),
        eps,
        N=width,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=num_warps or warps,
        **launch_options(),
    )
    return out, total


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    x_stride,
    residual_stride,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    values = tl.load(x + row * x_stride + column, inside, other=0.0)
    if ADD:
        more = tl.load(residual + row * residual_stride + column, inside, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(total + row * N + column, values, inside)
    scale = tl.load(weight + column, inside, other=0.0)
    tl.store(out + row * N + column, normalized(values, scale, eps, N), inside)


@triton.jit
def normalized(values, scale, eps, N: tl.constexpr):
    """Returns rms_norm of a row [BLOCK], which is 0 from N on, with the weight `scale` [BLOCK]. The order of the sum
    follows from the row's layout."""
    wide = values.to(tl.float32)
    return scaled(values, tl.rsqrt(tl.sum(wide * wide, 0) / N + eps), scale)


@triton.jit
def scaled(values, inverse_rms, scale):
    """Returns `values` times `inverse_rms`, times the weight `scale`, for tiles of any shape, rounded after each
    product."""
    normed = (values.to(tl.float32) * inverse_rms).to(values.dtype).to(tl.float32)
    return (scale.to(tl.float32) * normed).to(values.dtype)
