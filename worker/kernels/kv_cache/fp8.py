"""FP8 KV caches: one byte a number.

A number x is stored as x / scale, rounded to nearest, ties to even. Magnitudes beyond the largest of the format become
the largest, as by PTX's saturating conversion (`cvt.rn.satfinite`); NaN stays NaN. It is read as stored number times
scale. A layer has one scale for all tokens. This module is the definition in torch; kernels convert by `stored`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.widen import to_float32

# By the values of --kv-cache-dtype.
FORMATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class KVScales(NamedTuple):
    """The scales of a layer's rows in an FP8 cache. Latents are keys and values at once: they use the scale of keys."""

    keys: float = 1.0
    values: float = 1.0


UNSCALED = KVScales()


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype in FORMATS.values()


def to_cache(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Returns `x` as a cache of `dtype` stores it. The product with 1 / scale is float32. A cache of another dtype than
    FP8 has no scale."""
    if not is_fp8(dtype):
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return (x.float() * (1 / scale)).clamp(-largest, largest).to(dtype)


def from_cache(rows: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Returns stored `rows` in `dtype`. The product with the scale is float32."""
    return (to_float32(rows) * scale).to(dtype) if is_fp8(rows.dtype) else rows.to(dtype)


def rows_from_cache(
    rows: Tensor, dtype: torch.dtype, scales: KVScales, value_column: int
) -> Tensor:
    """Returns stored `rows` [..., W] in `dtype`. Columns from `value_column` on are values, those before it keys."""
    if scales.keys == scales.values:
        return from_cache(rows, dtype, scales.keys)
    keys, values = rows.tensor_split([value_column], dim=-1)
    converted = from_cache(keys, dtype, scales.keys), from_cache(values, dtype, scales.values)
    return torch.cat(converted, dim=-1)


def as_bytes(cache: Tensor) -> Tensor:
    """Returns a view of an FP8 cache as bytes, and any other cache itself. Torch cannot index all FP8 tensors."""
    return cache.view(torch.uint8) if is_fp8(cache.dtype) else cache


def largest_of(dtype: torch.dtype) -> float:
    """Returns the largest number of a cache's dtype for `stored`; 0 if the dtype is not FP8."""
    return torch.finfo(dtype).max if is_fp8(dtype) else 0.0


@triton.jit
def stored(x, dtype: tl.constexpr, inverse_scale, LARGEST: tl.constexpr):
    """Returns `x` as a cache of `dtype` stores it; LARGEST: see `largest_of`. Clamps before the conversion, which
    saturates on some GPUs only."""
    if LARGEST > 0:
        x = x.to(tl.float32) * inverse_scale
        x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)
