"""The products of `quantized_gemm.py` for few rows an expert, for Hopper's tensor cores (sm_90), in Gluon.

Reading the weights takes the time. As in `quantized_gemm_hopper.py` there is one program for each multiprocessor, and each
takes tile after tile: its ring (`expert_ring.py`) stays full from one tile to the next. Two warpgroups multiply, one each of
the two weight tiles of a step: gate and up, or the halves of down's outputs. The product is transposed, since a
warpgroup multiplies 64 rows: its rows are outputs, and its columns are the rows of a block.
"""

from __future__ import annotations

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

LAG = 3  # further steps that are under way when the rows and scales of a step are awaited
RING_BYTES = 206 << 10
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 120, 72  # of a thread
SCALES = gl.constexpr(4)  # of a row in a stage: its own, nothing, and one of each weight tile


def gate_up_few(x: Quantized, gate_up: Weight, blocks: Blocks, tile: Tile) -> Quantized:
    """`gate_up_quantized` with sorted rows, for weights with whole tiles (`has_whole_tiles`)."""
    width = gate_up.values.shape[1] // 2
    out = x.values.new_empty(blocks.intermediate_rows, width)
    out_scales = x.scales.new_empty(width // tile.block_n, len(out)).t()
    _launch(x, gate_up, blocks, tile, out, out_scales)
    return Quantized(out, out_scales, tile.block_n, x.dtype)


def down_few(gated: Quantized, down: Weight, blocks: Blocks, tile: Tile) -> Tensor:
    """`down_quantized` with sorted rows. A tile has twice `tile.block_n` outputs."""
    out = gated.values.new_empty(blocks.ids.numel(), down.values.shape[1], dtype=gated.dtype)
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
    height = tile.block_n
    stage_bytes = GROUP * (2 * height + blocks.rows) + SCALES.value * blocks.rows * 4
    _few_rows[programs(weight, blocks, height)](
        *arguments(x, weight, blocks, height, out, out_scales, tile.group_m),
        **constants(weight, blocks, height),
        STAGES=RING_BYTES // stage_bytes,
        LAG=LAG,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        **launch_options(),
    )


@gluon.jit(do_not_specialize=["num_pairs", "group_m", "group_stride", "out_group_stride"])
def _few_rows(
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
):
    """With `out_scales` the rows of x are tokens', and the outputs of gate and up become one. Otherwise they are the
    blocks' rows, and x is a descriptor of their tiles."""
    GATED: gl.constexpr = out_scales is not None
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    HEIGHT: gl.constexpr = weight.block_type.shape[0]
    DEPTH: gl.constexpr = weight.block_type.shape[1]
    of_rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], weight.dtype)
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES * 2, HEIGHT, DEPTH], weight.layout)
    rows = gl.allocate_shared_memory(weight.dtype, [STAGES, ROWS, DEPTH], of_rows)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, SCALES * ROWS], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)  # the weights, and the rows
        mbarrier.init(empty.index(stage), count=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ups = gl.allocate_shared_memory(gl.float32, [HEIGHT if GATED else 1, ROWS], flat)
    up_full = gl.allocate_shared_memory(gl.int64, [1], barriers)
    up_empty = gl.allocate_shared_memory(gl.int64, [1], barriers)
    mbarrier.init(up_full, count=1)
    mbarrier.init(up_empty, count=1)
    ring = weights, rows, scales, full, empty
    work = pairs, experts, block_count, num_pairs, group_m
    operands = ring, work, (out, out_scales, out_group_stride), (ups, up_full, up_empty)
    sources = x, weight, x_scales, weight_scales, row_stride, group_stride
    gl.warp_specialize(
        [
            (_consume, (operands, 0, INPUTS, OUTPUTS_OF_EXPERT, COLUMNS)),
            (_consume, (operands, 1, INPUTS, OUTPUTS_OF_EXPERT, COLUMNS)),
            (
                produce,
                (
                    (ring, work, sources),
                    GATED,
                    TOP_K,
                    INPUTS,
                    OUTPUTS_OF_EXPERT,
                    COLUMNS,
                    ROWS,
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
):
    """Multiplies one weight tile of each step, and stores the results. Those of up go to the first warpgroup through shared
    memory."""
    ring, work, results, exchange = operands
    weights, rows, scales, full, empty = ring
    pairs, _experts, block_count, num_pairs, group_m = work
    out, out_scales, out_group_stride = results
    ups, up_full, up_empty = exchange
    GATED: gl.constexpr = out_scales is not None
    STAGES: gl.constexpr = rows.shape[0]
    ROWS: gl.constexpr = rows.shape[1]
    HEIGHT: gl.constexpr = weights.shape[1]
    DEPTH: gl.constexpr = weights.shape[2]
    STEPS: gl.constexpr = INPUTS // DEPTH
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    of_columns: gl.constexpr = gl.SliceLayout(0, product)
    wait_for_previous()
    count = gl.load(block_count)
    step = 0
    done = 0
    tile = gl.program_id(0)
    nothing = gl.zeros([HEIGHT, ROWS], gl.float32, product)
    while tile < count * COLUMNS:
        block, column = block_and_column(tile, count, COLUMNS, group_m)
        sums = gl.zeros([HEIGHT, ROWS], gl.float32, product)
        for _ in range(STEPS):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            part = warpgroup_mma(
                weights.index(2 * stage + HALF),
                rows.index(stage).permute((1, 0)),
                nothing,
                use_acc=False,
                is_async=True,
            )
            of_stage = scales.index(stage)
            scale = of_stage.slice(0, ROWS).load(of_columns)
            scale *= of_stage.slice((2 + HALF) * ROWS, ROWS).load(of_columns)
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(stage))
            sums += part * gl.expand_dims(scale, 0)
            step += 1
        if GATED:
            if HALF == 1:
                mbarrier.wait(up_empty, (done & 1) ^ 1)
                ups.store(sums)
                gl.thread_barrier()
                mbarrier.arrive(up_full)
            else:
                mbarrier.wait(up_full, done & 1)
                up = ups.load(product)
                gl.thread_barrier()
                mbarrier.arrive(up_empty)
                _store_gated(
                    sums,
                    up,
                    out,
                    out_scales + column * out_group_stride,
                    block * ROWS,
                    column,
                    COLUMNS,
                )
        else:
            at = pairs + block * ROWS
            _store_rows(sums, out, at, num_pairs, (2 * column + HALF) * HEIGHT, OUTPUTS_OF_EXPERT)
        done += 1
        tile += gl.num_programs(0)


@gluon.jit
def _store_gated(gate, up, out, out_scales, first_row, column, COLUMNS: gl.constexpr):
    """Stores silu(gate) * up [outputs, rows], quantized as by `quantize.quantized`, with a scale for each row."""
    HEIGHT: gl.constexpr = gate.shape[0]
    ROWS: gl.constexpr = gate.shape[1]
    gated = gate / (1 + gl.exp(-gate)) * up
    largest = gl.maximum(gl.max(gl.abs(gated), 0), 1e-30)
    scale = gl.div_rn(largest, gl.full_like(largest, 448.0))
    inverse = gl.div_rn(gl.full_like(scale, 1.0), scale)
    rounded = (gated * gl.expand_dims(inverse, 0)).to(out.dtype.element_ty)
    row = first_row + gl.arange(0, ROWS, scale.type.layout)
    gl.store(out_scales + row, scale)
    stored: gl.constexpr = gl.BlockedLayout([16, 1], [8, 4], [1, 4], [0, 1])
    row = (first_row + gl.arange(0, ROWS, gl.SliceLayout(0, stored))).to(gl.int64)
    at = column * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, stored))
    to = out + gl.expand_dims(row * (COLUMNS * HEIGHT), 0) + gl.expand_dims(at, 1)
    gl.store(to, gl.convert_layout(rounded, stored))


@gluon.jit
def _store_rows(sums, out, pairs, num_pairs, first_column, N: gl.constexpr):
    """Stores columns [outputs, rows] of the rows of pairs."""
    HEIGHT: gl.constexpr = sums.shape[0]
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    pair = gl.load(pairs + gl.arange(0, sums.shape[1], gl.SliceLayout(0, stored)))
    at = first_column + gl.arange(0, HEIGHT, gl.SliceLayout(1, stored))
    to = out + gl.expand_dims(pair.to(gl.int64) * N, 0) + gl.expand_dims(at, 1)
    result = gl.convert_layout(sums.to(out.dtype.element_ty), stored)
    gl.store(to, result, gl.expand_dims(pair < num_pairs, 0))
