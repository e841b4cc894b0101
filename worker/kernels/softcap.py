"""Soft caps: numbers x become cap * tanh(x / cap), between -cap and cap (Gemma 2, arXiv:2408.00118, section 2.2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from mla_router.worker.kernels.pdl import launch_options, wait_for_previous

_BLOCK = 2048


def softcap_(x: Tensor, cap: float) -> Tensor:
    """Caps the float32 numbers of `x`, which is contiguous, in place, and returns it."""
    assert x.dtype == torch.float32 and x.is_contiguous(), f"{x.dtype}, strides {x.stride()}"
    return softcap_triton_(x, cap) if x.is_cuda else x.copy_(softcapped_torch(x, cap))


def softcapped_torch(x: Tensor, cap: float | None) -> Tensor:
    """Returns capped numbers; x itself without a cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


def softcap_triton_(x: Tensor, cap: float) -> Tensor:
    if x.numel():
        _softcap_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
            x, cap, x.numel(), BLOCK=_BLOCK, num_warps=4, **launch_options()
        )
    return x


@triton.jit(do_not_specialize=["cap", "count"])
def _softcap_kernel(x, cap, count, BLOCK: tl.constexpr):
    wait_for_previous()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, at < count, other=0.0)
    tl.store(x + at, softcapped(values, 1.0, cap), at < count)


@triton.jit
def softcapped(values, scale, cap):
    """Returns cap * tanh(values * scale / cap), for float32 of any shape: within cap * 1e-6 of the exact number."""
    return cap * tanh_of(values, scale / cap, True)


@triton.jit
def tanh_of(values, scale, EXACT: tl.constexpr):
    """Returns tanh(values * scale), for float32 of any shape: within 1e-6 if EXACT, otherwise within 2^-11 of itself.

    The GPU's tanh is one instruction. The exact one takes two, 2^x and 1 / x: tanh(x) is 1 - 2 / (1 + exp(2 x)).
    """
    if EXACT or not cuda_capability_geq(8, 0):  # the interpreter has no assembly
        power = tl.exp2(values * (scale * 2.8853900817779268))  # 2 * log2(e)
        result = 1 - 2 * _reciprocal(1 + power)
    else:
        result = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;",
            "=r,r",
            [values * scale],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def _reciprocal(x):
    if not cuda_capability_geq(8, 0):
        result = 1 / x
    else:
        # One instruction; Triton's division has ten, for the largest numbers as well
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return result
