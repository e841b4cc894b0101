"""Scales in the loops of products with quantized weights."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled(
    part,
    row_scale,
    scales,
    first,
    k,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Returns a product [rows, BLOCK_N] in float32, times the scales [rows] of its rows and the scales of BLOCK_N outputs
    from `first` on, in column `k` of `scales` [ceil(ROWS / SCALE_ROWS), SCALES]. Scales of all inputs are left to
    `scaled_sums`."""
    if SCALES == 1:
        return part.to(tl.float32) * row_scale[:, None]
    if SCALE_ROWS % BLOCK_N == 0:  # one scale
        scale = tl.load(
            scales + tl.minimum(first // SCALE_ROWS, (ROWS - 1) // SCALE_ROWS) * SCALES + k
        )
        return part.to(tl.float32) * (row_scale * scale)[:, None]
    return (
        part.to(tl.float32)
        * row_scale[:, None]
        * _column_of_scales(scales, first, k, ROWS, BLOCK_N, SCALE_ROWS, SCALES)
    )


@triton.jit
def scaled_sums(
    sums,
    scales,
    first,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Returns the sums [rows, BLOCK_N] of results of `scaled`, times the scales of outputs that have one for all
    inputs."""
    if SCALES == 1:
        sums *= _column_of_scales(scales, first, 0, ROWS, BLOCK_N, SCALE_ROWS, SCALES)
    return sums


@triton.jit
def _column_of_scales(
    scales,
    first,
    k,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Returns the scales [1, BLOCK_N] of outputs from `first` on, in column `k`."""
    n = first + tl.arange(0, BLOCK_N)
    return tl.load(scales + n // SCALE_ROWS * SCALES + k, n < ROWS, other=0.0)[None, :]


@triton.jit
def as_float16(x):
    """Returns x [..., K] float32 / powers of 2, in float16, and the powers [...]: the largest magnitude of each row is
    then between 1 and 2, and only numbers below 2**-14 of it lose bits."""
    last: tl.constexpr = len(x.shape) - 1
    largest = tl.maximum(tl.max(tl.abs(x), axis=last), 1e-30)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return (x * tl.expand_dims(1.0 / power, last)).to(tl.float16), power
