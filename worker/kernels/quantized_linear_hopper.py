"""x @ weight.T with FP8 weights for at most 256 quantized rows, for Hopper's tensor cores (sm_90), in Gluon.

A program is nine warps: one copies tiles to a ring (`hopper_ring.py`). Two warpgroups multiply, each every second tile,
whose inputs have one scale for each row of the weight and of x. They add the product times both scales to sums in
float32. The two sums are added at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_router.worker.kernels import hopper_ring as ring_of
from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.dispatch import is_hopper
from mla_router.worker.kernels.hopper_ring import (
    PRODUCER_REGISTERS,
    PRODUCT_ROWS,
    add_parts,
    empty_ring,
    fill,
    operands,
    store_transposed,
)
from mla_router.worker.kernels.pdl import launch_options, reads_early, wait_for_previous
from mla_router.worker.kernels.quantize import GROUP
from mla_router.worker.kernels.weight import Quantized, Weight

MAX_ROWS = 256
MAX_COLUMNS = 128  # of a warpgroup's product: rows of x times parts of the inputs
# Many rows of weights with more outputs, or with more inputs, are multiplied faster by torch's library
MOST_OUTPUTS, MOST_INPUTS = 16384, 4096
# Of so many outputs each tile of 64, with half of the rows, can have a multiprocessor to itself
FEW_OUTPUTS = 4096
# The fastest of 4, 8 and as many as have room on an H200. A multiple of the warpgroups that multiply, so that each tile
# of the ring has one of them: the parity of a barrier does not tell a warpgroup that is two rounds ahead
STAGES = 8
RING_BYTES = 160 << 10
CONSUMER_REGISTERS = {8: 96, 16: 96, 32: 112, 64: 160, 128: 232}  # of a thread, by columns


def suits_hopper(weight: Weight, rows: int) -> bool:
    """Whether `quantized_linear_hopper` serves a product of so many rows."""
    return in_ring(weight, rows) and is_hopper(weight.values.device)


def in_ring(weight: Weight, rows: int) -> bool:
    """Whether the kernel is the fastest on Hopper for so many rows of a weight, which must be FP8."""
    if weight.values.dtype != torch.float8_e4m3fn or weight.weight_only:
        return False
    outputs, inputs = weight.values.shape
    return 1 < rows <= most_rows(outputs, inputs)


def most_rows(outputs: int, inputs: int) -> int:
    """Returns the most rows for which the kernel is the fastest."""
    if outputs <= FEW_OUTPUTS:
        return MAX_ROWS
    if outputs > MOST_OUTPUTS:
        return 32
    return 128 if inputs <= MOST_INPUTS else 64


class Tiling(NamedTuple):
    rows: int  # of x in a tile, a power of 2
    split: int  # parts of the inputs (`hopper_ring.py`): `rows * split` is at most MAX_COLUMNS


def tiling(rows: int, outputs: int, inputs: int, multiprocessors: int) -> Tiling:
    """Returns the fastest tiling of a sweep on an H200 (docs/design/kernel_choices.md).

    A program copies rows of x as well. Of 128 rows they are twice as many bytes as its part of the weight. So the rows
    are divided into tiles of at least 32, and long inputs of few rows into parts, if each program still has a
    multiprocessor to itself.
    """
    tile, programs = min(ring_of.padded_rows(rows), MAX_COLUMNS), ring_of.programs(outputs, 1)
    while tile >= 64 and programs * -(-rows // (tile // 2)) <= multiprocessors:
        tile //= 2
    programs *= -(-rows // tile)
    is_split = inputs > MOST_INPUTS and tile <= 32 and 2 * programs <= multiprocessors
    return Tiling(tile, 2 if is_split else 1)


def splits(rows: int) -> tuple[int, ...]:
    """Returns the numbers of parts of the inputs that are possible with so many rows in a tile."""
    return tuple(split for split in (1, 2, 4) if split * rows <= MAX_COLUMNS)


def quantized_linear_hopper(
    x: Quantized,
    weight: Weight,
    *,
    out_dtype: torch.dtype,
    tiles: Tiling | None = None,
    stages: int = STAGES,
) -> Tensor:
    """Returns x @ weight.T [T, N] in `out_dtype`, for x [T, K] in groups of 128, T <= MAX_ROWS, K a multiple of 16.
    `tiles` and `stages`, an even number of stages of the ring, replace the choices, for benchmarks."""
    assert weight.scales is not None and x.group == GROUP, f"{x.group=}"
    (rows, inputs), outputs = x.values.shape, len(weight.values)
    assert 0 < rows <= MAX_ROWS and weight.values.shape == (outputs, inputs)
    columns, split = tiles or tiling(rows, outputs, inputs, limits(x.device).multiprocessors)
    assert split * columns <= MAX_COLUMNS
    steps = ring_of.steps_of(inputs, 1, split)
    stages = min(stages, RING_BYTES // ring_of.tile_bytes(columns, split) // 2 * 2)
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.values.device)
    _linear_kernel[(ring_of.programs(outputs, split), -(-rows // columns))](
        ring_of.tiles_of(x.values, columns),
        x.scales,
        ring_of.tiles_of(weight.values, PRODUCT_ROWS // split),
        weight.scales,
        out,
        rows,
        *x.scales.stride(),
        INPUTS=inputs,
        N=outputs,
        SCALE_ROWS=weight.block[0],
        SCALE_COLUMNS=weight.block[1],
        SPLIT=split,
        STEPS=steps,
        STAGES=min(stages, steps + steps % 2),
        AHEAD=weight.constant,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[split * columns],
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        **launch_options(),
    )
    return out


@reads_early({"AHEAD": ("weight", "weight_scales")})
@gluon.jit(do_not_specialize=["rows", "group_stride"])
def _linear_kernel(
    x,
    x_scales,
    weight,
    weight_scales,
    out,
    rows,
    row_stride,
    group_stride,
    INPUTS: gl.constexpr,
    N: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    SPLIT: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    ring = empty_ring(weight, x, SPLIT, STAGES)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    HEIGHT: gl.constexpr = SPLIT * weight.block_type.shape[0]
    COLUMNS: gl.constexpr = SPLIT * x.block_type.shape[0]
    other_sums = gl.allocate_shared_memory(gl.float32, [HEIGHT, COLUMNS], plain)
    summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(summed, count=1)
    scales = x_scales, weight_scales, row_stride, group_stride
    both = ring, other_sums, summed, scales, out, rows
    gl.warp_specialize(
        [
            (_consume, (both, 0, INPUTS, N, SCALE_ROWS, SCALE_COLUMNS, SPLIT, STEPS, AHEAD)),
            (_consume, (both, 1, INPUTS, N, SCALE_ROWS, SCALE_COLUMNS, SPLIT, STEPS, AHEAD)),
            (fill, (ring, weight, x, SPLIT, STEPS, AHEAD)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _consume(
    arguments,
    HALF: gl.constexpr,
    INPUTS: gl.constexpr,
    N: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    SPLIT: gl.constexpr,
    STEPS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Multiplies every second tile. The second half's sums are added by the first, which stores the result."""
    ring, other_sums, summed, scales, out, rows = arguments
    full, empty = ring[2], ring[3]
    x_scales, weight_scales, row_stride, group_stride = scales
    weights, columns = operands(ring)
    STAGES: gl.constexpr = full.shape[0]
    HEIGHT: gl.constexpr = weights.shape[1]
    COLUMNS: gl.constexpr = columns.shape[1]
    DEPTH: gl.constexpr = weights.shape[2]
    PART: gl.constexpr = HEIGHT // SPLIT
    ROWS: gl.constexpr = COLUMNS // SPLIT
    GROUPS: gl.constexpr = (INPUTS + DEPTH - 1) // DEPTH
    SCALES: gl.constexpr = (INPUTS + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    of_weight = gl.arange(0, HEIGHT, gl.SliceLayout(1, product))
    of_column = gl.arange(0, COLUMNS, gl.SliceLayout(0, product))
    output = gl.program_id(0) * PART + of_weight % PART
    row = gl.program_id(1) * ROWS + of_column % ROWS
    weight_part, x_part = of_weight // PART, of_column // ROWS
    weight_scale_at = weight_scales + gl.minimum(output, N - 1) // SCALE_ROWS * SCALES
    x_scale_at = x_scales + row * row_stride
    exists = row < rows
    # A group behind the last one has inputs of 0, and the scales of the last
    weight_group = gl.minimum(HALF * SPLIT + weight_part, GROUPS - 1)
    x_group = gl.minimum(HALF * SPLIT + x_part, GROUPS - 1)
    if not AHEAD:
        wait_for_previous()
    weight_scale = gl.load(weight_scale_at + weight_group * DEPTH // SCALE_COLUMNS)
    if AHEAD:
        wait_for_previous()
    x_scale = gl.load(x_scale_at + x_group * group_stride, exists, other=0.0)
    sums = gl.zeros([HEIGHT, COLUMNS], gl.float32, product)
    nothing = gl.zeros([HEIGHT, COLUMNS], gl.float32, product)
    for step in range(HALF, STEPS, 2):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        part = warpgroup_mma(
            weights.index(stage),
            columns.index(stage).permute((1, 0)),
            nothing,
            use_acc=False,
            is_async=True,
        )
        # The scales of the next step arrive while the product is computed
        first_group = (step + 2) * SPLIT
        weight_group = gl.minimum(first_group + weight_part, GROUPS - 1)
        x_group = gl.minimum(first_group + x_part, GROUPS - 1)
        next_weight_scale = gl.load(weight_scale_at + weight_group * DEPTH // SCALE_COLUMNS)
        next_x_scale = gl.load(x_scale_at + x_group * group_stride, exists, other=0.0)
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(stage))
        sums += part * (gl.expand_dims(weight_scale, 1) * gl.expand_dims(x_scale, 0))
        weight_scale, x_scale = next_weight_scale, next_x_scale
    if HALF == 1:
        other_sums.store(sums)
        gl.thread_barrier()
        mbarrier.arrive(summed)
    else:
        mbarrier.wait(summed, 0)
        sums += other_sums.load(product)
        store_transposed(add_parts(sums, SPLIT, product), out, rows, N)
