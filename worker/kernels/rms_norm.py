"""Root mean square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467), alone and with the preceding addition
of the residual.

The mean and the division are in float32 and rounded to the weight's dtype before the weight is applied, as in training:
that of x, or float32 (Gemma 2).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.kernels.quantize import GROUP, empty_rows, in_form, store_quantized
from mla_router.worker.kernels.weight import PLAIN_ROWS, Activations, Quantized, RowForm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last axis, for x [..., N] and weight [N] of one dtype or a
    float32 weight, in x's shape and dtype."""
    return rms_norm_triton(x, weight, eps) if on_gpu(x) else rms_norm_torch(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns rms_norm(x + residual) and x + residual, for x and residual [..., N] of one dtype. The sum is rounded to it
    before the norm."""
    add = add_rms_norm_triton if on_gpu(x) else add_rms_norm_torch
    return add(x, residual, weight, eps)


def norm_rows(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    form: RowForm,
    before: Tensor | None = None,
) -> tuple[Activations, Tensor]:
    """Returns rms_norm(x + residual) in `form`, and the sum, x itself without a residual, for x and residual [T, N].
    `before` [N]: the weight of a norm of x before the sum. It needs a residual."""
    if on_gpu(x):
        return norm_rows_triton(x, residual, weight, eps, form, before)
    if before is not None:
        x = rms_norm_torch(x, before, eps)
    if residual is None:
        return in_form(rms_norm_torch(x, weight, eps), form), x
    normed, total = add_rms_norm_torch(x, residual, weight, eps)
    return in_form(normed, form), total


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert x.shape[-1:] == weight.shape, f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * (wide * inverse_rms).to(weight.dtype)).to(x.dtype)


def add_rms_norm_torch(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_torch(total, weight, eps), total


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, *, num_warps: int | None = None
) -> Tensor:
    """Launches a program for each row. `num_warps` replaces `tiling`, for benchmarks."""
    out, _, _ = _launch(x, None, weight, eps, PLAIN_ROWS, num_warps)
    assert out is not None
    return out


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, num_warps: int | None = None
) -> tuple[Tensor, Tensor]:
    """Launches a program for each row, which keeps the sum in registers for both results."""
    out, _, total = _launch(x, residual, weight, eps, PLAIN_ROWS, num_warps)
    assert out is not None
    return out, total


def norm_rows_triton(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    form: RowForm,
    before: Tensor | None = None,
) -> tuple[Activations, Tensor]:
    """Launches a program for each row, which quantizes it as well."""
    plain, quantized, total = _launch(x, residual, weight, eps, form, None, before)
    rows = plain if quantized is None else quantized
    assert rows is not None, f"{form}"
    return rows, total


# From so many rows on more warps are faster (docs/design/kernel_choices.md)
MANY_ROWS = 1024


def tiling(width: int) -> tuple[int, int]:
    """Returns the block, which is the power of 2 that holds a row, and the number of warps: 32 bytes of bfloat16 a
    thread, within 1 and 8 warps."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 512, 1), 8)


def same_kind(a: Tensor, b: Tensor) -> bool:
    """Whether both have one shape, dtype and layout."""
    return (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    form: RowForm,
    num_warps: int | None,
    before: Tensor | None = None,
) -> tuple[Tensor | None, Quantized | None, Tensor]:
    """Returns the two forms of the normalized rows, and the sum."""
    width = x.shape[-1]
    rows, others = x.reshape(-1, width), x if residual is None else residual
    others = others.reshape(-1, width)
    assert (
        weight.shape == (width,)
        and rows.shape == others.shape
        and x.dtype == others.dtype
        and weight.dtype in (x.dtype, torch.float32)
        and (before is None or (residual is not None and same_kind(before, weight)))
        and rows.stride(1) == others.stride(1) == weight.stride(0) == 1
    ), (
        f"x {tuple(x.shape)} {x.stride()} {x.dtype}, residual {tuple(others.shape)} "
        f"{others.stride()} {others.dtype}, weight {tuple(weight.shape)} {weight.dtype}"
    )
    block, warps = tiling(width)
    if len(rows) >= MANY_ROWS:
        warps = min(2 * warps, 8)
    assert form.quantized is None or block >= GROUP, f"{width} columns, {form}"
    out, quantized = empty_rows(rows, width, form)
    out = None if out is None else out.view(x.shape)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms_norm_kernel[(len(rows),)](
        rows,
        others,
        weight,
        before,
        out,
        total,
        quantized and quantized.values,
        quantized and quantized.scales,
        rows.stride(0),
        others.stride(0),
        quantized.scales.stride(1) if quantized else 0,
        eps,
        N=width,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=num_warps or warps,
        **launch_options(),
    )
    return out, quantized, total


@triton.jit(do_not_specialize=["group_stride"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    before,
    out,
    total,
    quantized,
    scales,
    x_stride,
    residual_stride,
    group_stride,
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
    if before is not None:
        values = normalized(values, tl.load(before + column, inside, other=0.0), eps, N)
    if ADD:
        more = tl.load(residual + row * residual_stride + column, inside, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(total + row * N + column, values, inside)
    scale = tl.load(weight + column, inside, other=0.0)
    result = normalized(values, scale, eps, N)
    if out is not None:
        tl.store(out + row * N + column, result, inside)
    if quantized is not None:
        store_quantized(result, 0, quantized, scales, row, group_stride, True, N)


@triton.jit
def normalized(values, scale, eps, N: tl.constexpr):
    """Returns rms_norm of a row [BLOCK], which is 0 from N on, with the weight `scale` [BLOCK]. The order of the sum
    follows from the row's layout."""
    wide = values.to(tl.float32)
    return scaled(values, tl.rsqrt(tl.sum(wide * wide, 0) / N + eps), scale)


@triton.jit
def scaled(values, inverse_rms, scale):
    """Returns `values` times `inverse_rms`, rounded to the dtype of the weight `scale`, times the weight, rounded to that
    of `values`, for tiles of any shape."""
    normed = (values.to(tl.float32) * inverse_rms).to(scale.dtype).to(tl.float32)
    return (scale.to(tl.float32) * normed).to(values.dtype)
