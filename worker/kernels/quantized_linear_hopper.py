"""x @ weight.T with FP8 weights for at most 64 quantized rows, for Hopper's tensor cores (sm_90), in Gluon.

Reading the weight takes the time, so its bytes must always be under way. A program is nine warps. One warp copies tiles
of the weight and of x to a ring in shared memory, the first tiles of a constant weight before the wait for the kernel
that writes x (`pdl.py`). Two warpgroups multiply, each every second group of 128 inputs, and add the product
times both scales to sums in float32. The two sums are added at the end.

The product is transposed: a warpgroup multiplies at least 64 rows, so the rows of the product are outputs and its
columns the rows of x.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_router.worker.kernels.dispatch import is_hopper
from mla_router.worker.kernels.pdl import launch_options, reads_early, wait_for_previous
from mla_router.worker.kernels.quantize import GROUP
from mla_router.worker.kernels.weight import Quantized, Weight

MAX_ROWS = 64
MAX_OUTPUTS_OF_MANY_ROWS = (
    16384  # for over 32 rows: larger weights have programs enough for the other kernel
)
OUTPUTS = 64  # of a program: rows of a warpgroup's product
# The fastest of 4, 8 and as many as have room on an H200. A multiple of the warpgroups that multiply, so that each tile
# of the ring has one of them: the parity of a barrier does not tell a warpgroup that is two rounds ahead
STAGES = 8
CONSUMER_REGISTERS = {8: 96, 16: 96, 32: 112, 64: 160}  # of a thread, by rows of x in a tile
PRODUCER_REGISTERS = 24


def suits_hopper(weight: Weight, rows: int) -> bool:
    """Whether `quantized_linear_hopper` serves a product of so many rows."""
    is_fp8 = weight.values.dtype == torch.float8_e4m3fn
    return is_fp8 and in_ring(len(weight.values), rows) and is_hopper(weight.values.device)


def in_ring(outputs: int, rows: int) -> bool:
    """Whether the kernel is the fastest for so many rows, on an H200."""
    return rows <= (32 if outputs > MAX_OUTPUTS_OF_MANY_ROWS else MAX_ROWS)


def quantized_linear_hopper(x: Quantized, weight: Weight, *, out_dtype: torch.dtype) -> Tensor:
    """Returns x @ weight.T [T, N] in `out_dtype`, for x [T, K] in groups of 128, T <= MAX_ROWS, K a multiple of 16."""
    assert weight.scales is not None and x.group == GROUP, f"{x.group=}"
    (rows, inputs), outputs = x.values.shape, len(weight.values)
    assert 0 < rows <= MAX_ROWS and weight.values.shape == (outputs, inputs)
    columns = max(triton.next_power_of_2(rows), 8)
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.values.device)
    _linear_kernel[(triton.cdiv(outputs, OUTPUTS),)](
        _tiles(x.values, columns),
        x.scales,
        _tiles(weight.values, OUTPUTS),
        weight.scales,
        out,
        rows,
        *x.scales.stride(),
        INPUTS=inputs,
        N=outputs,
        SCALE_ROWS=weight.block[0],
        SCALE_COLUMNS=weight.block[1],
        STAGES=min(STAGES, triton.cdiv(inputs, GROUP)),
        AHEAD=weight.constant,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[columns],
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        **launch_options(),
    )
    return out


def _tiles(matrix: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, GROUP], _layout(rows))


@cache
def _layout(rows: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, GROUP], gl.float8e4nv)


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
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    OUTPUTS: gl.constexpr = weight.block_type.shape[0]
    ROWS: gl.constexpr = x.block_type.shape[0]
    DEPTH: gl.constexpr = weight.block_type.shape[1]
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES, OUTPUTS, DEPTH], weight.layout)
    activations = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, DEPTH], x.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    other_sums = gl.allocate_shared_memory(gl.float32, [OUTPUTS, ROWS], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    summed = gl.allocate_shared_memory(gl.int64, [1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(summed, count=1)
    ring = weights, activations, full, empty
    scales = x_scales, weight_scales, row_stride, group_stride
    operands = ring, other_sums, summed, scales, out, rows
    gl.warp_specialize(
        [
            (_consume, (operands, 0, INPUTS, N, SCALE_ROWS, SCALE_COLUMNS, AHEAD)),
            (_consume, (operands, 1, INPUTS, N, SCALE_ROWS, SCALE_COLUMNS, AHEAD)),
            (_produce, (ring, weight, x, INPUTS, AHEAD)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(ring, weight, x, INPUTS: gl.constexpr, AHEAD: gl.constexpr):
    """Copies the tiles of all groups of inputs."""
    weights, activations, full, empty = ring
    STAGES: gl.constexpr = weights.shape[0]
    DEPTH: gl.constexpr = weights.shape[2]
    STEPS: gl.constexpr = (INPUTS + DEPTH - 1) // DEPTH
    BEGINNING: gl.constexpr = min(STAGES, STEPS)
    BYTES: gl.constexpr = weight.block_type.nbytes + x.block_type.nbytes
    first = gl.program_id(0) * weights.shape[1]
    if not AHEAD:
        wait_for_previous()
    for step in gl.static_range(BEGINNING):
        mbarrier.expect(full.index(step), BYTES)
        tma.async_copy_global_to_shared(
            weight, [first, step * DEPTH], full.index(step), weights.index(step)
        )
    if AHEAD:
        wait_for_previous()
    for step in gl.static_range(BEGINNING):
        tma.async_copy_global_to_shared(
            x, [0, step * DEPTH], full.index(step), activations.index(step)
        )
    for step in range(BEGINNING, STEPS):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        tma.async_copy_global_to_shared(
            weight, [first, step * DEPTH], full.index(stage), weights.index(stage)
        )
        tma.async_copy_global_to_shared(
            x, [0, step * DEPTH], full.index(stage), activations.index(stage)
        )


@gluon.jit
def _consume(
    operands,
    HALF: gl.constexpr,
    INPUTS: gl.constexpr,
    N: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Multiplies every second tile. The second half's sums are added by the first, which stores the result."""
    ring, other_sums, summed, scales, out, rows = operands
    weights, activations, full, empty = ring
    x_scales, weight_scales, row_stride, group_stride = scales
    STAGES: gl.constexpr = weights.shape[0]
    OUTPUTS: gl.constexpr = weights.shape[1]
    DEPTH: gl.constexpr = weights.shape[2]
    ROWS: gl.constexpr = activations.shape[1]
    STEPS: gl.constexpr = (INPUTS + DEPTH - 1) // DEPTH
    SCALES: gl.constexpr = (INPUTS + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    first = gl.program_id(0) * OUTPUTS
    output = first + gl.arange(0, OUTPUTS, gl.SliceLayout(1, product))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, product))
    weight_scale_at = weight_scales + gl.minimum(output, N - 1) // SCALE_ROWS * SCALES
    x_scale_at = x_scales + row * row_stride
    exists = row < rows
    if not AHEAD:
        wait_for_previous()
    weight_scale = gl.load(weight_scale_at + HALF * DEPTH // SCALE_COLUMNS)
    if AHEAD:
        wait_for_previous()
    x_scale = gl.load(x_scale_at + HALF * group_stride, exists, other=0.0)
    sums = gl.zeros([OUTPUTS, ROWS], gl.float32, product)
    nothing = gl.zeros([OUTPUTS, ROWS], gl.float32, product)
    for step in range(HALF, STEPS, 2):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        part = warpgroup_mma(
            weights.index(stage),
            activations.index(stage).permute((1, 0)),
            nothing,
            use_acc=False,
            is_async=True,
        )
        # The scales of the next step arrive while the product is computed
        next_step = gl.minimum(step + 2, STEPS - 1)
        next_weight_scale = gl.load(weight_scale_at + next_step * DEPTH // SCALE_COLUMNS)
        next_x_scale = gl.load(x_scale_at + next_step * group_stride, exists, other=0.0)
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
        stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        result = gl.convert_layout(sums.to(out.dtype.element_ty), stored)
        to = first + gl.arange(0, OUTPUTS, gl.SliceLayout(1, stored))
        of = gl.arange(0, ROWS, gl.SliceLayout(0, stored))
        at = out + gl.expand_dims(of.to(gl.int64) * N, 0) + gl.expand_dims(to, 1)
        gl.store(at, result, gl.expand_dims(of < rows, 0) & gl.expand_dims(to < N, 1))
