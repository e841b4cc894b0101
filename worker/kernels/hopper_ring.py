"""A ring of tiles in shared memory for x @ weight.T with few rows, for Hopper's tensor cores (sm_90), in Gluon.

Reading the weight takes the time, so its bytes must always be under way, from one kernel to the next. One warp copies
tiles of the weight and of x to the ring, the first tiles of a constant weight before the wait for the kernel that
writes x (`pdl.py`): a ring fills while a norm or an activation computes x. Warpgroups of a kernel multiply
(`linear_hopper.py`, `quantized_linear_hopper.py`).

The product is transposed: a warpgroup multiplies 64 rows, which are rows of the weight, and its columns are rows of x.
The 64 rows are SPLIT parts of the inputs of 64 / SPLIT outputs, and the columns are the rows of x, once for each part.
Of the SPLIT x SPLIT products of parts those on the diagonal belong together, and are added at the end (`add_parts`).
With a SPLIT there are as many times more programs, each with fewer bytes. The second axis of the grid divides the rows of
x: with fewer rows a program copies fewer bytes as well.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_router.worker.kernels.pdl import wait_for_previous

PRODUCT_ROWS = 64  # of a warpgroup: SPLIT parts of a program's outputs
# Of a row in a tile, the widest swizzle of shared memory: four steps of a tensor core
DEPTH_BYTES = 128
PRODUCER_REGISTERS = 24  # of a thread
ELEMENTS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}


def padded_rows(rows: int) -> int:
    """Returns the rows of x in a tile: a tensor core takes a multiple of 8 columns."""
    return max(1 << (rows - 1).bit_length(), 8)


def tile_bytes(rows: int, split: int) -> int:
    """Returns the bytes of a stage of the ring, for so many rows of x in a tile."""
    return DEPTH_BYTES * (PRODUCT_ROWS + split * rows)


def steps_of(inputs: int, itemsize: int, split: int) -> int:
    """Returns the stages that a program fills."""
    return -(-inputs * itemsize // (split * DEPTH_BYTES))


def programs(outputs: int, split: int) -> int:
    return -(-outputs * split // PRODUCT_ROWS)


def tiles_of(matrix: Tensor, rows: int) -> TensorDescriptor:
    """Returns the descriptor of a matrix [N, K], contiguous in the last axis, in tiles of so many rows."""
    depth = DEPTH_BYTES // matrix.itemsize
    layout = _layout(rows, depth, matrix.dtype)
    strides = [matrix.stride(0), 1]
    return TensorDescriptor(matrix, list(matrix.shape), strides, [rows, depth], layout)


@cache
def _layout(rows: int, depth: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, depth], ELEMENTS[dtype])


@gluon.jit
def empty_ring(weight, x, SPLIT: gl.constexpr, STAGES: gl.constexpr):
    """Returns the memory of tiles of weight and x, and a barrier of each stage for full and for empty tiles."""
    PART: gl.constexpr = weight.block_type.shape[0]
    ROWS: gl.constexpr = x.block_type.shape[0]
    DEPTH: gl.constexpr = weight.block_type.shape[1]
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    weights = gl.allocate_shared_memory(weight.dtype, [SPLIT * STAGES, PART, DEPTH], weight.layout)
    activations = gl.allocate_shared_memory(x.dtype, [SPLIT * STAGES, ROWS, DEPTH], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    return weights, activations, full, empty


@gluon.jit
def fill(ring, weight, x, SPLIT: gl.constexpr, STEPS: gl.constexpr, AHEAD: gl.constexpr):
    """Copies the tiles of all inputs. A weight that is read AHEAD is read before the wait."""
    full, empty = ring[2], ring[3]
    STAGES: gl.constexpr = full.shape[0]
    BEGINNING: gl.constexpr = min(STAGES, STEPS)
    BYTES: gl.constexpr = SPLIT * (weight.block_type.nbytes + x.block_type.nbytes)
    if not AHEAD:
        wait_for_previous()
    for step in gl.static_range(BEGINNING):
        mbarrier.expect(full.index(step), BYTES)
        _copy_weight(ring, weight, step, step, SPLIT)
    if AHEAD:
        wait_for_previous()
    for step in gl.static_range(BEGINNING):
        _copy_rows(ring, x, step, step, SPLIT)
    for step in range(BEGINNING, STEPS):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        _copy_weight(ring, weight, step, stage, SPLIT)
        _copy_rows(ring, x, step, stage, SPLIT)


@gluon.jit
def _copy_weight(ring, weight, step, stage, SPLIT: gl.constexpr):
    weights, full = ring[0], ring[2]
    PART: gl.constexpr = weights.shape[1]
    DEPTH: gl.constexpr = weights.shape[2]
    first = gl.program_id(0) * PART
    for part in gl.static_range(SPLIT):
        tma.async_copy_global_to_shared(
            weight,
            [first, (SPLIT * step + part) * DEPTH],
            full.index(stage),
            weights.index(SPLIT * stage + part),
        )


@gluon.jit
def _copy_rows(ring, x, step, stage, SPLIT: gl.constexpr):
    activations, full = ring[1], ring[2]
    ROWS: gl.constexpr = activations.shape[1]
    DEPTH: gl.constexpr = activations.shape[2]
    first = gl.program_id(1) * ROWS
    for part in gl.static_range(SPLIT):
        tma.async_copy_global_to_shared(
            x,
            [first, (SPLIT * step + part) * DEPTH],
            full.index(stage),
            activations.index(SPLIT * stage + part),
        )


@gluon.jit
def operands(ring):
    """Returns the tiles of the stages as operands: weights [STAGES, SPLIT * PART, DEPTH], rows [STAGES, SPLIT * ROWS,
    DEPTH]."""
    weights, activations, full, _ = ring
    STAGES: gl.constexpr = full.shape[0]
    DTYPE: gl.constexpr = weights.dtype
    DEPTH: gl.constexpr = weights.shape[2]
    SPLIT: gl.constexpr = weights.shape[0] // STAGES
    HEIGHT: gl.constexpr = SPLIT * weights.shape[1]
    COLUMNS: gl.constexpr = SPLIT * activations.shape[1]
    of_weights: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, DEPTH], DTYPE)
    of_rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, DEPTH], DTYPE)
    return (
        weights._reinterpret(DTYPE, [STAGES, HEIGHT, DEPTH], of_weights),
        activations._reinterpret(DTYPE, [STAGES, COLUMNS, DEPTH], of_rows),
    )


@gluon.jit
def add_parts(sums, SPLIT: gl.constexpr, product: gl.constexpr):
    """Returns the sum [outputs, rows] over the parts of the inputs."""
    result = sums
    if SPLIT > 1:
        PART: gl.constexpr = sums.shape[0] // SPLIT
        ROWS: gl.constexpr = sums.shape[1] // SPLIT
        part = gl.arange(0, sums.shape[0], gl.SliceLayout(1, product)) // PART
        of = gl.arange(0, sums.shape[1], gl.SliceLayout(0, product)) // ROWS
        belongs = gl.expand_dims(part, 1) == gl.expand_dims(of, 0)
        parts = gl.where(belongs, sums, 0.0).reshape([SPLIT, PART, SPLIT, ROWS])
        result = gl.sum(gl.sum(parts, 2), 0)
    return result


@gluon.jit
def store_transposed(result, out, rows, N: gl.constexpr):
    """Stores a result [outputs, rows] of a program to out [rows, N]."""
    OUTPUTS: gl.constexpr = result.shape[0]
    ROWS: gl.constexpr = result.shape[1]
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [OUTPUTS // 8, 256 // OUTPUTS], [1, 4], [0, 1])
    result = gl.convert_layout(result.to(out.dtype.element_ty), stored)
    output = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, stored))
    row = gl.program_id(1) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, stored))
    at = out + gl.expand_dims(row.to(gl.int64) * N, 0) + gl.expand_dims(output, 1)
    gl.store(at, result, gl.expand_dims(row < rows, 0) & gl.expand_dims(output < N, 1))
