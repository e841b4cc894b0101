"""The experts' two matrix products with quantized weights, over blocks of rows with one expert each.

A product of quantized values is exact within a step of the loop, which lies within one scale of the weight and one
scale of the rows. Its result is multiplied by both scales and added to sums in float32: the tensor cores' own sums of
FP8 have fewer bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).

The result of the first product leaves it quantized, with one scale for each row and tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_router.worker.kernels.moe.align import Blocks, block_rows
from mla_router.worker.kernels.moe.gemm_programs import (
    block_and_column,
    block_arguments,
    tile_constants,
)
from mla_router.worker.kernels.moe.tiling import Tile
from mla_router.worker.kernels.pdl import wait_for_previous
from mla_router.worker.kernels.quantize import quantized
from mla_router.worker.kernels.weight import Quantized, Weight
from mla_router.worker.kernels.weight_scales import scaled, scaled_sums


@triton.jit
def product(rows, weights):
    """Returns rows @ weights.T. The first operand of `wgmma` has 64 rows: the weights' if `rows` has fewer."""
    if rows.shape[0] < 64:
        return tl.dot(weights, rows.T).T
    return tl.dot(rows, weights.T)


@triton.jit(do_not_specialize=["max_blocks", "num_pairs", "group_m", "group_stride"])
def _gate_up(
    x,
    x_scales,
    weight,
    weight_scales,
    out,
    out_scales,
    ids,
    pairs,
    experts,
    block_count,
    max_blocks,
    num_pairs,
    group_m,
    row_stride,
    group_stride,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    X_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes BLOCK_N of WIDTH columns of out[row] = silu(gate) * up of x[pair[row] // TOP_K], quantized, and their
    scale."""
    wait_for_previous()
    COLUMNS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    SCALES: tl.constexpr = (HIDDEN + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    SCALE_BLOCKS: tl.constexpr = (2 * WIDTH + SCALE_ROWS - 1) // SCALE_ROWS
    DTYPE: tl.constexpr = out.dtype.element_ty
    block, column = block_and_column(tl.program_id(0), max_blocks, COLUMNS, group_m)
    expert, pair, rows, exists = block_rows(
        block, ids, pairs, experts, block_count, max_blocks, num_pairs, TOP_K, BLOCK_TOP_K, ROWS
    )
    if not exists:
        return
    real = pair < num_pairs
    token = tl.where(real, pair // TOP_K, 0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    first = column * BLOCK_N
    x_at = x + token[:, None] * HIDDEN + k[None, :]
    of_expert = expert.to(tl.int32)
    weight_scales += expert * (SCALE_BLOCKS * SCALES)
    gate = tl.zeros((ROWS, BLOCK_N), tl.float32)
    up = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        inside = real[:, None]
        if HIDDEN % BLOCK_K:
            inside &= (start + k < HIDDEN)[None, :]
        a = tl.load(x_at + start, inside, other=0.0)
        a_scale_at = x_scales + token * row_stride + start // X_GROUP * group_stride
        a_scale = tl.load(a_scale_at, real, other=0.0)
        gate_part = product(a, weight.load([of_expert, 0, first, start]).reshape(BLOCK_N, BLOCK_K))
        up_part = product(a, weight.load([of_expert, 1, first, start]).reshape(BLOCK_N, BLOCK_K))
        column_k = start // SCALE_COLUMNS
        gate += scaled(
            gate_part,
            a_scale,
            weight_scales,
            first,
            column_k,
            2 * WIDTH,
            BLOCK_N,
            SCALE_ROWS,
            SCALES,
        )
        up += scaled(
            up_part,
            a_scale,
            weight_scales,
            WIDTH + first,
            column_k,
            2 * WIDTH,
            BLOCK_N,
            SCALE_ROWS,
            SCALES,
        )
    gate = scaled_sums(gate, weight_scales, first, 2 * WIDTH, BLOCK_N, SCALE_ROWS, SCALES)
    up = scaled_sums(up, weight_scales, WIDTH + first, 2 * WIDTH, BLOCK_N, SCALE_ROWS, SCALES)
    gated, scale = quantized(gate / (1 + tl.exp(-gate)) * up, DTYPE)
    at = first + tl.arange(0, BLOCK_N)
    tl.store(
        out + rows[:, None] * WIDTH + at[None, :], gated, real[:, None] & (at < WIDTH)[None, :]
    )
    tl.store(out_scales + rows * COLUMNS + column, scale, real)


@triton.jit(do_not_specialize=["max_blocks", "num_pairs", "group_m"])
def _down(
    gated,
    rows_of_gated,
    gated_scales,
    weight,
    weight_scales,
    out,
    ids,
    pairs,
    experts,
    block_count,
    max_blocks,
    num_pairs,
    group_m,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    X_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes BLOCK_N of HIDDEN columns of out[pair[row]] = down(gated[row])."""
    wait_for_previous()
    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    X_SCALES: tl.constexpr = (WIDTH + X_GROUP - 1) // X_GROUP
    SCALES: tl.constexpr = (WIDTH + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    SCALE_BLOCKS: tl.constexpr = (HIDDEN + SCALE_ROWS - 1) // SCALE_ROWS
    block, column = block_and_column(tl.program_id(0), max_blocks, COLUMNS, group_m)
    expert, pair, rows, exists = block_rows(
        block, ids, pairs, experts, block_count, max_blocks, num_pairs, TOP_K, BLOCK_TOP_K, ROWS
    )
    if not exists:
        return
    real = pair < num_pairs
    k = tl.arange(0, BLOCK_K)
    first = column * BLOCK_N
    weight_scales += expert * (SCALE_BLOCKS * SCALES)
    sums = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        if rows_of_gated is None:
            inside = real[:, None]
            if WIDTH % BLOCK_K:
                inside &= (start + k < WIDTH)[None, :]
            a = tl.load(gated + rows[:, None] * WIDTH + (start + k)[None, :], inside, other=0.0)
        else:
            a = rows_of_gated.load([block * ROWS, start])
        a_scale = tl.load(gated_scales + rows * X_SCALES + start // X_GROUP, real, other=0.0)
        # Columns past the end are weights of another expert, or zeros, and are not stored
        tile = weight.load([(expert * HIDDEN).to(tl.int32) + first, start])
        part = product(a, tile)
        sums += scaled(
            part,
            a_scale,
            weight_scales,
            first,
            start // SCALE_COLUMNS,
            HIDDEN,
            BLOCK_N,
            SCALE_ROWS,
            SCALES,
        )
    sums = scaled_sums(sums, weight_scales, first, HIDDEN, BLOCK_N, SCALE_ROWS, SCALES)
    weight_row = first + tl.arange(0, BLOCK_N)
    at = out + pair.to(tl.int64)[:, None] * HIDDEN + weight_row[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), real[:, None] & (weight_row < HIDDEN)[None, :])


def gate_up_quantized(x: Quantized, gate_up: Weight, blocks: Blocks, tile: Tile) -> Quantized:
    """Returns silu(gate) * up of the rows of blocks, [blocks.intermediate_rows, I], in groups of tile.block_n columns.
    Padding is not written. x [T, N] contiguous, gate_up [E, 2I, N]; N and I are multiples of 16."""
    assert gate_up.scales is not None
    _, double, hidden = gate_up.values.shape
    _check_steps(tile.block_k, gate_up.block[1], x.group, hidden)
    columns = triton.cdiv(double // 2, tile.block_n)
    out = x.values.new_empty(blocks.intermediate_rows, double // 2)
    out_scales = x.scales.new_empty(len(out), columns)
    halves = gate_up.values.view(-1, 2, double // 2, hidden)
    _gate_up[(blocks.max_blocks * columns,)](
        x.values,
        x.scales,
        TensorDescriptor.from_tensor(halves, [1, 1, tile.block_n, tile.block_k]),
        gate_up.scales,
        out,
        out_scales,
        *block_arguments(blocks),
        tile.group_m,
        *x.scales.stride(),
        HIDDEN=hidden,
        WIDTH=double // 2,
        SCALE_ROWS=gate_up.block[0],
        SCALE_COLUMNS=gate_up.block[1],
        X_GROUP=x.group,
        **tile_constants(blocks, tile),
    )
    return Quantized(out, out_scales, tile.block_n, x.dtype)


def down_quantized(gated: Quantized, down: Weight, blocks: Blocks, tile: Tile) -> Tensor:
    """Returns rows [P, N] in gated.dtype, in the order of the pairs. down [E, N, I]; I is a multiple of 16."""
    assert down.scales is not None
    _, hidden, width = down.values.shape
    _check_steps(tile.block_k, down.block[1], gated.group, width)
    out = gated.values.new_empty(blocks.ids.numel(), hidden, dtype=gated.dtype)
    rows = None
    if blocks.pairs is not None:
        rows = TensorDescriptor.from_tensor(gated.values, [blocks.rows, tile.block_k])
    weight = TensorDescriptor.from_tensor(down.values.flatten(0, 1), [tile.block_n, tile.block_k])
    _down[(blocks.max_blocks * triton.cdiv(hidden, tile.block_n),)](
        gated.values,
        rows,
        gated.scales,
        weight,
        down.scales,
        out,
        *block_arguments(blocks),
        tile.group_m,
        HIDDEN=hidden,
        WIDTH=width,
        SCALE_ROWS=down.block[0],
        SCALE_COLUMNS=down.block[1],
        X_GROUP=gated.group,
        **tile_constants(blocks, tile),
    )
    return out


def _check_steps(step: int, weight_columns: int, group: int, inputs: int) -> None:
    """A step of the loop must lie within one scale of the weight and one of the rows."""
    assert weight_columns >= inputs or weight_columns % step == 0, f"{step=}, {weight_columns=}"
    assert group % step == 0, f"{step=}, {group=}"
