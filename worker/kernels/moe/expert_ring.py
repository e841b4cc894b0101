"""Copies of weight tiles and rows to a ring in shared memory, for the FP8 products of experts on Hopper, in Gluon.

Four warps copy the tiles of all steps, and their scales: weights and the rows of blocks by the tensor memory accelerator, the
rows of tokens one by one. A step has two weight tiles, next to each other in the ring: gate and up, or two of down.
Warpgroups multiply (`quantized_gemm_hopper.py`, `quantized_few_hopper.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.moe.align import Blocks
from mla_router.worker.kernels.moe.gemm_programs import block_and_column
from mla_router.worker.kernels.pdl import wait_for_previous
from mla_router.worker.kernels.quantize import GROUP
from mla_router.worker.kernels.weight import Quantized, Weight

SCALED_OUTPUTS = gl.constexpr(128)  # of a weight, which have one scale for each group of inputs


def programs(weight: Weight, blocks: Blocks, height: int) -> tuple[int]:
    """Returns the grid of a kernel that takes tile after tile: a program for each multiprocessor. A weight tile has `height`
    outputs."""
    tiles = blocks.max_blocks * _columns(weight, height)
    return (min(limits(weight.values.device).multiprocessors, tiles),)


def arguments(
    x: Quantized,
    weight: Weight,
    blocks: Blocks,
    height: int,
    out: Tensor,
    out_scales: Tensor | None,
    group_m: int,
) -> tuple[Any, ...]:
    """Returns the arguments of a kernel, for sorted blocks. With `out_scales` the rows of x are tokens', otherwise the
    blocks'."""
    assert blocks.pairs is not None and x.group == GROUP, f"{x.group=}"
    assert weight.scales is not None and x.values.numel() < 1 << 31
    rows: Tensor | TensorDescriptor = x.values
    if out_scales is None:
        rows = _tiles_of(x.values, blocks.rows)
    return (
        rows,
        x.scales,
        _tiles_of(weight.values.flatten(0, 1), height),
        weight.scales,
        out,
        out_scales,
        blocks.pairs,
        blocks.experts,
        blocks.count,
        blocks.ids.numel(),
        group_m,
        *x.scales.stride(),
        0 if out_scales is None else out_scales.stride(1),
    )


def constants(weight: Weight, blocks: Blocks, height: int) -> dict[str, int]:
    """Returns the constants of a kernel that follow from the shapes."""
    _, outputs, inputs = weight.values.shape
    return {
        "TOP_K": blocks.ids.shape[1],
        "INPUTS": inputs,
        "OUTPUTS_OF_EXPERT": outputs,
        "COLUMNS": _columns(weight, height),
        "ROWS": blocks.rows,
    }


def _columns(weight: Weight, height: int) -> int:
    return weight.values.shape[1] // (2 * height)


def _tiles_of(matrix: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, GROUP], _layout(rows))


@cache
def _layout(rows: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, GROUP], gl.float8e4nv)


@gluon.jit
def produce(
    operands,
    GATED: gl.constexpr,
    TOP_K: gl.constexpr,
    INPUTS: gl.constexpr,
    OUTPUTS_OF_EXPERT: gl.constexpr,
    COLUMNS: gl.constexpr,
    LINES: gl.constexpr,
    LAG: gl.constexpr,
):
    """Copies the tiles of all steps, and their scales: first one for each row, at the end of a stage's memory LINES times
    the scale of each weight tile. Those of a step are announced when those of LAG more steps are under way. GATED: the rows
    are tokens', otherwise the blocks'."""
    ring, work, sources = operands
    weights, rows, _scales, full, _empty = ring
    row_stride = sources[4]
    pairs, experts, block_count, num_pairs, group_m = work
    ROWS: gl.constexpr = rows.shape[1]
    OUTPUTS: gl.constexpr = weights.shape[1]
    DEPTH: gl.constexpr = weights.shape[2]
    STEPS: gl.constexpr = INPUTS // DEPTH
    OTHER: gl.constexpr = OUTPUTS_OF_EXPERT // 2 if GATED else OUTPUTS
    TILE: gl.constexpr = OUTPUTS if GATED else 2 * OUTPUTS
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, copied))
    k = gl.arange(0, DEPTH, gl.SliceLayout(0, copied))
    copied_scales: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    line = gl.arange(0, ROWS, copied_scales)
    of_second = gl.arange(0, 2 * LINES, copied_scales) // LINES
    wait_for_previous()
    count = gl.load(block_count)
    step = 0
    tile = gl.program_id(0)
    block, column = block_and_column(tile, count, COLUMNS, group_m)
    if GATED:
        token = _tokens(pairs, _existing(block, count), row, num_pairs, TOP_K, ROWS)
        token_of_line = _tokens(pairs, _existing(block, count), line, num_pairs, TOP_K, ROWS)
    while tile < count * COLUMNS:
        expert = gl.load(experts + block)
        first = expert * OUTPUTS_OF_EXPERT + column * TILE
        first_row = block * ROWS
        if GATED:
            x_at = gl.expand_dims(token * INPUTS, 1) + gl.expand_dims(k, 0)
            x_scale_at = token_of_line.to(gl.int64) * row_stride
            real = gl.expand_dims(token >= 0, 1), token_of_line >= 0
        else:
            x_at = first_row
            x_scale_at = (first_row + line).to(gl.int64) * row_stride
            real = None, None
        weight_scale_at = (first + of_second * OTHER) // SCALED_OUTPUTS * STEPS
        tile += gl.num_programs(0)
        block, column = block_and_column(tile, count, COLUMNS, group_m)
        if GATED:  # known when the next tile begins
            token = _tokens(pairs, _existing(block, count), row, num_pairs, TOP_K, ROWS)
            token_of_line = _tokens(pairs, _existing(block, count), line, num_pairs, TOP_K, ROWS)
        for i in range(STEPS):
            places = first, x_at, x_scale_at, weight_scale_at, real
            _copy_step(ring, sources, places, step, i, GATED, OTHER)
            if step >= LAG:
                _announce(full, step - LAG, LAG)
            step += 1
    for i in gl.static_range(LAG):
        if step >= LAG - i:
            _announce(full, step - LAG + i, LAG - 1 - i)


@gluon.jit
def _existing(block, count):
    """Returns the block, or another one if it is after the last."""
    return gl.maximum(gl.minimum(block, count - 1), 0)


@gluon.jit
def _tokens(pairs, block, row, num_pairs, TOP_K: gl.constexpr, ROWS: gl.constexpr):
    """Returns the tokens of rows of a block, -1 for padding."""
    pair = gl.load(pairs + block * ROWS + row)
    return gl.where(pair < num_pairs, pair // TOP_K, -1)


@gluon.jit
def _copy_step(ring, sources, places, step, i, GATED: gl.constexpr, OTHER: gl.constexpr):
    """Starts the copies of step i of a tile, once their stage of the ring is released. `places`: the first row of the
    weight (its second tile begins OTHER rows later), x's first row or, if GATED, the offsets of its elements, the offsets
    of both operands' scales, and if GATED which rows of x and of its scales are no padding. Padding is not read: reads of
    the same row by all programs take longer than those of the weights."""
    weights, rows, scales, full, empty = ring
    x, weight, x_scales, weight_scales, _row_stride, group_stride = sources
    first, x_at, x_scale_at, weight_scale_at, real = places
    real_rows, real_lines = real
    STAGES: gl.constexpr = rows.shape[0]
    ROWS: gl.constexpr = rows.shape[1]
    DEPTH: gl.constexpr = weights.shape[2]
    BYTES_OF_ROWS: gl.constexpr = 0 if GATED else ROWS * DEPTH
    LINES: gl.constexpr = weight_scale_at.shape[0]
    WEIGHT_LINE: gl.constexpr = scales.shape[1] - LINES
    stage = step % STAGES
    arrived = full.index(stage)
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(arrived, 2 * weight.block_type.nbytes + BYTES_OF_ROWS)
    tma.async_copy_global_to_shared(weight, [first, i * DEPTH], arrived, weights.index(2 * stage))
    tma.async_copy_global_to_shared(
        weight, [first + OTHER, i * DEPTH], arrived, weights.index(2 * stage + 1)
    )
    if GATED:
        async_copy.async_copy_global_to_shared(rows.index(stage), x + i * DEPTH + x_at, real_rows)
    else:
        tma.async_copy_global_to_shared(x, [x_at, i * DEPTH], arrived, rows.index(stage))
    of_stage = scales.index(stage)
    async_copy.async_copy_global_to_shared(
        of_stage.slice(0, ROWS), x_scales + x_scale_at + i * group_stride, real_lines
    )
    async_copy.async_copy_global_to_shared(
        of_stage.slice(WEIGHT_LINE, LINES), weight_scales + weight_scale_at + i
    )
    async_copy.commit_group()


@gluon.jit
def _announce(full, step, UNDER_WAY: gl.constexpr):
    """Says that the rows and scales of a step have arrived, after which UNDER_WAY steps are under way."""
    STAGES: gl.constexpr = full.shape[0]
    async_copy.wait_group(UNDER_WAY)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(full.index(step % STAGES))
