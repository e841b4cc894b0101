"""The products of `quantized_gemm.py` for prompts, for Hopper's tensor cores (sm_90), in Gluon.

With many rows an expert the tensor cores take the time, and reads of tiles from L2 if tiles are small. A tile is 128
rows x 256 outputs, so that two reads serve as many products as possible: 128 outputs of gate and the same of up, or 256
of down. A program is twelve warps. Four copy tiles and their scales to a ring in shared memory (`expert_ring.py`). Two
warpgroups multiply 64 rows each. While one adds a product times its scales to its sums in float32, the product of the
other uses the tensor cores. There is one program for each multiprocessor, and each takes tile after tile: the next one
arrives while results of the last one are written. Scales that the warpgroups loaded from memory themselves, one step
ahead, were late.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_router.worker.kernels.moe.align import Blocks
from mla_router.worker.kernels.moe.expert_ring import arguments, constants, produce, programs
from mla_router.worker.kernels.moe.gemm_programs import block_and_column
from mla_router.worker.kernels.moe.tiling import Tile
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.kernels.quantize import GROUP
from mla_router.worker.kernels.weight import Quantized, Weight

ROWS = 128  # of a block
OUTPUTS = 128  # of each of the two weights of a tile: rows of a block of scales
NUM_WARPS = 12  # tilings with this many are of these kernels
LAG = 1  # further steps that are under way when the rows and scales of a step are awaited
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 216, 72  # of a thread


def has_whole_tiles(gate_up: Weight, down: Weight) -> bool:
    """Whether the kernels serve experts: FP8 in blocks of 128 x 128, and whole tiles."""
    _, hidden, width = down.values.shape
    return (
        gate_up.values.dtype == down.values.dtype == torch.float8_e4m3fn
        and gate_up.block == down.block == (OUTPUTS, GROUP)
        and hidden % (2 * OUTPUTS) == 0
        and width % OUTPUTS == 0
    )


def gate_up_hopper(x: Quantized, gate_up: Weight, blocks: Blocks, tile: Tile) -> Quantized:
    """`gate_up_quantized` with blocks of ROWS sorted rows, and groups of OUTPUTS columns."""
    width = gate_up.values.shape[1] // 2
    out = x.values.new_empty(blocks.intermediate_rows, width)
    out_scales = x.scales.new_empty(width // OUTPUTS, len(out)).t()
    _launch(x, gate_up, blocks, tile, out, out_scales)
    return Quantized(out, out_scales, OUTPUTS, x.dtype)


def down_hopper(gated: Quantized, down: Weight, blocks: Blocks, tile: Tile) -> Tensor:
    """`down_quantized` with blocks of ROWS sorted rows."""
    hidden = down.values.shape[1]
    out = gated.values.new_empty(blocks.ids.numel(), hidden, dtype=gated.dtype)
    _launch(gated, down, blocks, tile, out, None)
    return out


def _launch(
    x: Quantized,
    weight: Weight,
    blocks: Blocks,
    tile: Tile,
    out: Tensor,
    out_scales: Tensor | None,
) -> None:
    assert blocks.rows == ROWS, f"{blocks.rows=}"
    _grouped[programs(weight, blocks, OUTPUTS)](
        *arguments(x, weight, blocks, OUTPUTS, out, out_scales, tile.group_m),
        **constants(weight, blocks, OUTPUTS),
        STAGES=tile.num_stages,
        LAG=LAG,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        SKIPS=tile.skips_padding,
        num_warps=4,
        **launch_options(),
    )


@gluon.jit(do_not_specialize=["num_pairs", "group_m", "group_stride", "out_group_stride"])
def _grouped(
    x,
    x_scales,
    weight,
    weight_scales,
    out,
    out_scales,
    pairs,
    experts,
    block_count,
    num_pairs,
    group_m,
    row_stride,
    group_stride,
    out_group_stride,
    TOP_K: gl.constexpr,
    INPUTS: gl.constexpr,
    OUTPUTS_OF_EXPERT: gl.constexpr,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    LAG: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    SKIPS: gl.constexpr,
):
    """With `out_scales` the rows of x are tokens', and the outputs of gate and up become one. Otherwise they are the
    blocks' rows, and x is a descriptor of their tiles. Two weight tiles of a step are next to each other in the
    ring."""
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    OUTPUTS: gl.constexpr = weight.block_type.shape[0]
    DEPTH: gl.constexpr = weight.block_type.shape[1]
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES * 2, OUTPUTS, DEPTH], weight.layout)
    rows = gl.allocate_shared_memory(weight.dtype, [STAGES, ROWS, DEPTH], weight.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * ROWS], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)  # the weights, and the rows
        mbarrier.init(empty.index(stage), count=2)
    ring = weights, rows, scales, full, empty
    work = pairs, experts, block_count, num_pairs, group_m
    operands = ring, work, (out, out_scales, out_group_stride)
    sources = x, weight, x_scales, weight_scales, row_stride, group_stride
    gl.warp_specialize(
        [
            (_consume, (operands, 0, INPUTS, OUTPUTS_OF_EXPERT, COLUMNS, SKIPS)),
            (_consume, (operands, 1, INPUTS, OUTPUTS_OF_EXPERT, COLUMNS, SKIPS)),
            (
                produce,
                (
                    (ring, work, sources),
                    out_scales is not None,
                    TOP_K,
                    INPUTS,
                    OUTPUTS_OF_EXPERT,
                    COLUMNS,
                    ROWS // 2,
                    LAG,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _consume(
    operands,
    HALF: gl.constexpr,
    INPUTS: gl.constexpr,
    OUTPUTS_OF_EXPERT: gl.constexpr,
    COLUMNS: gl.constexpr,
    SKIPS: gl.constexpr,
):
    """Multiplies the first or the last half of the rows of each tile, and stores the results. SKIPS: not if all are
    padding."""
    ring, work, results = operands
    weights, rows, _scales, _full, _empty = ring
    pairs, _experts, block_count, num_pairs, group_m = work
    out, out_scales, out_group_stride = results
    GATED: gl.constexpr = out_scales is not None
    ROWS: gl.constexpr = rows.shape[1]
    OUTPUTS: gl.constexpr = weights.shape[1]
    DEPTH: gl.constexpr = weights.shape[2]
    STEPS: gl.constexpr = INPUTS // DEPTH
    PART: gl.constexpr = ROWS // 2
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 32])
    wait_for_previous()
    count = gl.load(block_count)
    step = 0
    tile = gl.program_id(0)
    while tile < count * COLUMNS:
        block, column = block_and_column(tile, count, COLUMNS, group_m)
        row = block * ROWS + HALF * PART
        is_real = True
        if SKIPS:
            is_real = gl.load(pairs + row) < num_pairs
        if is_real:
            step, first, second = _multiply(ring, step, HALF, STEPS, product)
            if GATED:
                to_scales = out_scales + column * out_group_stride
                _store_gated(first, second, out, to_scales, row, column, COLUMNS)
            else:
                at = pairs + row
                left = column * 2 * OUTPUTS
                _store_rows(first, out, at, num_pairs, left, OUTPUTS_OF_EXPERT)
                _store_rows(second, out, at, num_pairs, left + OUTPUTS, OUTPUTS_OF_EXPERT)
        else:
            step = _release(ring, step, STEPS)
        tile += gl.num_programs(0)


@gluon.jit
def _multiply(ring, step, HALF: gl.constexpr, STEPS: gl.constexpr, product: gl.constexpr):
    """Returns the step after a tile, and the sums of half of its rows for both weight tiles."""
    weights, rows, scales, full, empty = ring
    STAGES: gl.constexpr = rows.shape[0]
    ROWS: gl.constexpr = rows.shape[1]
    OUTPUTS: gl.constexpr = weights.shape[1]
    PART: gl.constexpr = ROWS // 2
    of_rows: gl.constexpr = gl.SliceLayout(1, product)
    nothing = gl.zeros([PART, OUTPUTS], gl.float32, product)
    first = gl.zeros([PART, OUTPUTS], gl.float32, product)
    second = gl.zeros([PART, OUTPUTS], gl.float32, product)
    for _ in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        operand = rows.index(stage).slice(HALF * PART, PART)
        part = warpgroup_mma(
            operand,
            weights.index(2 * stage).permute((1, 0)),
            nothing,
            use_acc=False,
            is_async=True,
        )
        of_stage = scales.index(stage)
        x_scale = of_stage.slice(HALF * PART, PART).load(of_rows)
        first_scale = of_stage.slice(ROWS, PART).load(of_rows) * x_scale
        second_scale = of_stage.slice(ROWS + PART, PART).load(of_rows) * x_scale
        part = warpgroup_mma_wait(0, deps=[part])
        first += part * gl.expand_dims(first_scale, 1)
        part = warpgroup_mma(
            operand,
            weights.index(2 * stage + 1).permute((1, 0)),
            nothing,
            use_acc=False,
            is_async=True,
        )
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(stage))
        second += part * gl.expand_dims(second_scale, 1)
        step += 1
    return step, first, second


@gluon.jit
def _release(ring, step, STEPS: gl.constexpr):
    """Releases the stages of a tile, once they are full, and returns the step after it."""
    _weights, rows, _scales, full, empty = ring
    STAGES: gl.constexpr = rows.shape[0]
    for _ in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        mbarrier.arrive(empty.index(stage))
        step += 1
    return step


@gluon.jit
def _store_gated(gate, up, out, out_scales, first_row, column, COLUMNS: gl.constexpr):
    """Stores silu(gate) * up, quantized as by `quantize.quantized`, with a scale for each row."""
    gated = gate / (1 + gl.exp(-gate)) * up
    largest = gl.maximum(gl.max(gl.abs(gated), 1), 1e-30)
    scale = gl.div_rn(largest, gl.full_like(largest, 448.0))
    inverse = gl.div_rn(gl.full_like(scale, 1.0), scale)
    rounded = (gated * gl.expand_dims(inverse, 1)).to(out.dtype.element_ty)
    row = first_row + gl.arange(0, gate.shape[0], scale.type.layout)
    gl.store(out_scales + row, scale)
    stored: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    row = (first_row + gl.arange(0, gate.shape[0], gl.SliceLayout(1, stored))).to(gl.int64)
    at = column * gate.shape[1] + gl.arange(0, gate.shape[1], gl.SliceLayout(0, stored))
    to = out + gl.expand_dims(row * (COLUMNS * gate.shape[1]), 1) + gl.expand_dims(at, 0)
    gl.store(to, gl.convert_layout(rounded, stored))


@gluon.jit
def _store_rows(sums, out, pairs, num_pairs, first_column, N: gl.constexpr):
    """Stores columns of the rows of pairs."""
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    pair = gl.load(pairs + gl.arange(0, sums.shape[0], gl.SliceLayout(1, stored)))
    at = first_column + gl.arange(0, sums.shape[1], gl.SliceLayout(0, stored))
    to = out + gl.expand_dims(pair.to(gl.int64) * N, 1) + gl.expand_dims(at, 0)
    result = gl.convert_layout(sums.to(out.dtype.element_ty), stored)
    gl.store(to, result, gl.expand_dims(pair < num_pairs, 1))
