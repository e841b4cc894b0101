"""The products of `quantized_gemm.py` for few rows an expert, for Hopper's tensor cores (sm_90), in Gluon.

Reading the weights takes the time. As in `quantized_gemm_hopper.py` there is one program for each multiprocessor, and each
takes tile after tile: its ring of tiles stays full from one tile to the next. Four warps copy. Two warpgroups multiply, one
each of the two weight tiles of a step: gate and up, or the halves of down's outputs. The product is transposed, since a
warpgroup multiplies 64 rows: its rows are outputs, and its columns are the rows of a block.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.moe.align import Blocks
from mla_router.worker.kernels.moe.gemm_programs import block_and_column
from mla_router.worker.kernels.moe.quantized_gemm_hopper import (
    announce,
    existing_block,
    tokens_of_rows,
)
from mla_router.worker.kernels.moe.tiling import Tile
from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.kernels.quantize import GROUP
from mla_router.worker.kernels.weight import Quantized, Weight

LAG = 3  # further steps that are under way when the rows and scales of a step are awaited
RING_BYTES = 206 << 10
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 120, 72  # of a thread
# Of a row in a stage: its own, one of each weight tile, and room up to a power of 2
SCALES = gl.constexpr(4)
SCALED_OUTPUTS = gl.constexpr(128)  # of a weight, which have one scale for each group of inputs


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
    assert blocks.pairs is not None and x.group == GROUP, f"{blocks.rows=}"
    assert weight.scales is not None and x.values.numel() < 1 << 31
    _, outputs, inputs = weight.values.shape
    height = tile.block_n
    columns = outputs // (2 * height)
    matrix = TensorDescriptor.from_tensor(
        weight.values.flatten(0, 1), [height, GROUP], _layout(height)
    )
    rows: Tensor | TensorDescriptor = x.values
    if out_scales is None:
        rows = TensorDescriptor.from_tensor(x.values, [blocks.rows, GROUP], _layout(blocks.rows))
    stage_bytes = GROUP * (2 * height + blocks.rows) + SCALES.value * blocks.rows * 4
    programs = min(limits(x.values.device).multiprocessors, blocks.max_blocks * columns)
    _few_rows[(programs,)](
        rows,
        x.scales,
        matrix,
        weight.scales,
        out,
        out_scales,
        blocks.pairs,
        blocks.experts,
        blocks.count,
        blocks.ids.numel(),
        tile.group_m,
        *x.scales.stride(),
        0 if out_scales is None else out_scales.stride(1),
        TOP_K=blocks.ids.shape[1],
        INPUTS=inputs,
        OUTPUTS_OF_EXPERT=outputs,
        COLUMNS=columns,
        ROWS=blocks.rows,
        STAGES=RING_BYTES // stage_bytes,
        LAG=LAG,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        **launch_options(),
    )


@cache
def _layout(rows: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, GROUP], gl.float8e4nv)


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
                _produce,
                ((ring, work, sources), GATED, TOP_K, INPUTS, OUTPUTS_OF_EXPERT, COLUMNS, LAG),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(
    operands,
    GATED: gl.constexpr,
    TOP_K: gl.constexpr,
    INPUTS: gl.constexpr,
    OUTPUTS_OF_EXPERT: gl.constexpr,
    COLUMNS: gl.constexpr,
    LAG: gl.constexpr,
):
    """Copies the tiles of all steps, and their scales, of which a weight tile's is copied once for each row. Those of a step
    are announced when those of LAG more steps are under way."""
    ring, work, sources = operands
    weights, rows, _scales, full, _empty = ring
    row_stride = sources[4]
    pairs, experts, block_count, num_pairs, group_m = work
    ROWS: gl.constexpr = rows.shape[1]
    HEIGHT: gl.constexpr = weights.shape[1]
    DEPTH: gl.constexpr = weights.shape[2]
    STEPS: gl.constexpr = INPUTS // DEPTH
    OTHER: gl.constexpr = OUTPUTS_OF_EXPERT // 2 if GATED else HEIGHT
    TILE: gl.constexpr = HEIGHT if GATED else 2 * HEIGHT
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, copied))
    k = gl.arange(0, DEPTH, gl.SliceLayout(0, copied))
    copied_scales: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    line = gl.arange(0, ROWS, copied_scales)
    wait_for_previous()
    count = gl.load(block_count)
    step = 0
    tile = gl.program_id(0)
    block, column = block_and_column(tile, count, COLUMNS, group_m)
    if GATED:
        token = tokens_of_rows(pairs, existing_block(block, count), row, num_pairs, TOP_K, ROWS)
        token_of_line = tokens_of_rows(
            pairs, existing_block(block, count), line, num_pairs, TOP_K, ROWS
        )
    while tile < count * COLUMNS:
        expert = gl.load(experts + block)
        first = expert * OUTPUTS_OF_EXPERT + column * TILE
        first_row = block * ROWS
        source_of_line = first_row + line
        x_at = first_row
        if GATED:
            source_of_line = token_of_line
            x_at = gl.expand_dims(token * INPUTS, 1) + gl.expand_dims(k, 0)
        x_scale_at = source_of_line.to(gl.int64) * row_stride
        weight_scale_at = line * 0 + first // SCALED_OUTPUTS * STEPS
        other_scale_at = line * 0 + (first + OTHER) // SCALED_OUTPUTS * STEPS
        tile += gl.num_programs(0)
        block, column = block_and_column(tile, count, COLUMNS, group_m)
        if GATED:  # known when the next tile begins
            token = tokens_of_rows(pairs, existing_block(block, count), row, num_pairs, TOP_K, ROWS)
            token_of_line = tokens_of_rows(
                pairs, existing_block(block, count), line, num_pairs, TOP_K, ROWS
            )
        for i in range(STEPS):
            places = first, x_at, x_scale_at, weight_scale_at, other_scale_at
            _copy_step(ring, sources, places, step, i, GATED, OTHER)
            if step >= LAG:
                announce(full, step - LAG, LAG)
            step += 1
    for i in gl.static_range(LAG):
        if step >= LAG - i:
            announce(full, step - LAG + i, LAG - 1 - i)


@gluon.jit
def _copy_step(ring, sources, places, step, i, GATED: gl.constexpr, OTHER: gl.constexpr):
    """Starts the copies of step i of a tile, once their stage of the ring is released. `places`: the first row of the
    weight (its second tile begins OTHER rows later), x's first row or, if GATED, the offsets of its elements, and the
    offsets of the scales of x and of both weight tiles."""
    weights, rows, scales, full, empty = ring
    x, weight, x_scales, weight_scales, _row_stride, group_stride = sources
    first, x_at, x_scale_at, weight_scale_at, other_scale_at = places
    STAGES: gl.constexpr = rows.shape[0]
    ROWS: gl.constexpr = rows.shape[1]
    DEPTH: gl.constexpr = weights.shape[2]
    stage = step % STAGES
    arrived = full.index(stage)
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    bytes_of_rows: gl.constexpr = 0 if GATED else ROWS * DEPTH
    mbarrier.expect(arrived, 2 * weight.block_type.nbytes + bytes_of_rows)
    tma.async_copy_global_to_shared(weight, [first, i * DEPTH], arrived, weights.index(2 * stage))
    tma.async_copy_global_to_shared(
        weight, [first + OTHER, i * DEPTH], arrived, weights.index(2 * stage + 1)
    )
    if GATED:
        async_copy.async_copy_global_to_shared(rows.index(stage), x + i * DEPTH + x_at)
    else:
        tma.async_copy_global_to_shared(x, [x_at, i * DEPTH], arrived, rows.index(stage))
    of_stage = scales.index(stage)
    async_copy.async_copy_global_to_shared(
        of_stage.slice(0, ROWS), x_scales + x_scale_at + i * group_stride
    )
    async_copy.async_copy_global_to_shared(
        of_stage.slice(ROWS, ROWS), weight_scales + weight_scale_at + i
    )
    async_copy.async_copy_global_to_shared(
        of_stage.slice(2 * ROWS, ROWS), weight_scales + other_scale_at + i
    )
    async_copy.commit_group()


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
            scale *= of_stage.slice((1 + HALF) * ROWS, ROWS).load(of_columns)
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
