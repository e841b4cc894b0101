"""The value up-projection of absorbed attention (`absorb.py`), whose results leave it as rows of the output projection.

A head's values are one group of columns of such a row. So a program computes all values of a head, and quantizes them
at its end (`quantize.py`). Few heads would be too few such programs.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.attention.absorb import FEW_HEADS, expand_values
from mla_router.worker.kernels.attention.absorb_quantized import StaticFP8, weight_tile
from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.pdl import launch_options, reads_early, wait_for_previous
from mla_router.worker.kernels.quantize import GROUP, empty_rows, in_form, quantized
from mla_router.worker.kernels.weight import Activations, RowForm, Weight

MAX_TOKENS = 128
PROGRAMS = 128  # one wave
BLOCK_INPUTS = 128  # of a step


class Tiles(NamedTuple):
    rows: int
    num_warps: int = 8
    num_stages: int = 4
    ahead: bool = False  # a program loads all of its weights at once, before the wait


def expand_rows(
    latent: Tensor, w_uv: Weight, form: RowForm, fp8: StaticFP8 | None = None
) -> Activations:
    """Returns latent [T, H, C] @ w_uv [H, V, C] transposed, for each head, as rows [T, H * V] in `form`. For `fp8` see
    `expand_values`."""
    if on_gpu(latent) and form.quantized is not None and is_served(latent, w_uv):
        return expand_rows_triton(latent, w_uv, form)
    out = latent.new_empty(*latent.shape[:2], w_uv.values.shape[1])
    expand_values(latent, w_uv, out, fp8)
    return in_form(out.flatten(1), form)


def is_served(latent: Tensor, w_uv: Weight) -> bool:
    """Whether one kernel for rows and scales is the fastest on an H100: of more than FEW_HEADS heads with a group of
    values each, with plain weights."""
    tokens, heads, inputs = latent.shape
    is_whole = w_uv.values.shape[1] == GROUP and inputs % BLOCK_INPUTS == 0
    return w_uv.is_plain and is_whole and heads > FEW_HEADS and 0 < tokens <= MAX_TOKENS


def tiling(heads: int, tokens: int, *, constant: bool) -> Tiles:
    """Returns the fastest tiles of a sweep on an H100, with 128 heads: one wave of programs."""
    rows = min(max(triton.next_power_of_2(triton.cdiv(tokens * heads, PROGRAMS)), 16), MAX_TOKENS)
    if rows == 16 and constant:
        return Tiles(rows, ahead=True)
    if rows <= 32:
        return Tiles(rows, num_warps=4)
    return Tiles(rows, num_stages=4 if rows <= 64 else 3)


def expand_rows_triton(
    latent: Tensor, w_uv: Weight, form: RowForm, *, tiles: Tiles | None = None
) -> Activations:
    """A constant weight is read before the wait (`pdl.py`). `tiles` replaces `tiling`, for benchmarks."""
    tokens, heads, inputs = latent.shape
    weight = w_uv.values
    assert weight.shape == (heads, GROUP, inputs) and latent.stride(2) == weight.stride(2) == 1, (
        f"latent {tuple(latent.shape)} {latent.stride()}, weight {tuple(weight.shape)}"
    )
    assert weight.stride(1) == inputs and inputs % BLOCK_INPUTS == 0, f"{weight.stride()}"
    tiles = tiles or tiling(heads, tokens, constant=w_uv.constant)
    plain, rows = empty_rows(latent, heads * GROUP, form)
    assert rows is not None, f"{form}"
    _expand_rows_kernel[(heads, triton.cdiv(tokens, tiles.rows))](
        latent,
        weight,
        plain,
        rows.values,
        rows.scales,
        tokens,
        latent.stride(0),
        latent.stride(1),
        weight.stride(0),
        rows.scales.stride(1),
        HEADS=heads,
        INPUTS=inputs,
        VALUES=GROUP,
        BLOCK_ROWS=tiles.rows,
        BLOCK_INPUTS=BLOCK_INPUTS,
        STAGES=tiles.num_stages,
        AHEAD=tiles.ahead,
        num_warps=tiles.num_warps,
        **launch_options(),
    )
    return rows


@reads_early({"AHEAD": ("weight",)})
@triton.jit(do_not_specialize=["tokens", "group_stride"])
def _expand_rows_kernel(
    latent,
    weight,
    plain,
    values,
    scales,
    tokens,
    latent_stride_t,
    latent_stride_h,
    weight_stride,
    group_stride,
    HEADS: tl.constexpr,
    INPUTS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = (row < tokens)[:, None]
    inputs, value = tl.arange(0, BLOCK_INPUTS), tl.arange(0, VALUES)
    at = row.to(tl.int64)[:, None]
    latent_at = latent + at * latent_stride_t + head * latent_stride_h + inputs[None, :]
    weight += head.to(tl.int64) * weight_stride
    acc = tl.zeros([BLOCK_ROWS, VALUES], tl.float32)
    if AHEAD:
        tiles = tl.tuple(())
        for start in tl.static_range(0, INPUTS, BLOCK_INPUTS):
            tiles += (weight_tile(weight, start, inputs, value, INPUTS, VALUES, True),)
        wait_for_previous()
        for start in tl.static_range(0, INPUTS, BLOCK_INPUTS):
            x = tl.load(latent_at + start, is_row, other=0.0)
            acc = tl.dot(x, tiles[start // BLOCK_INPUTS], acc, input_precision="ieee")
    else:
        wait_for_previous()
        for start in tl.range(0, INPUTS, BLOCK_INPUTS, num_stages=STAGES):
            x = tl.load(latent_at + start, is_row, other=0.0)
            w = weight_tile(weight, start, inputs, value, INPUTS, VALUES, True)
            acc = tl.dot(x, w, acc, input_precision="ieee")
    result = acc.to(latent.dtype.element_ty)
    to = at * (HEADS * VALUES) + head * VALUES + value[None, :]
    if plain is not None:
        tl.store(plain + to, result, is_row)
    rounded, scale = quantized(result.to(tl.float32), values.dtype.element_ty)
    tl.store(values + to, rounded, is_row)
    tl.store(scales + head * group_stride + row, scale, row < tokens)
