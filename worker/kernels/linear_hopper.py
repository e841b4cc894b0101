"""x @ weight.T for 2 to 64 rows and a large 16-bit weight, for Hopper's tensor cores (sm_90), in Gluon.

Reading the weight takes the time, so its bytes must always be under way, from one kernel to the next. A program is five
warps. One warp copies tiles of the weight and of x to a ring in shared memory, the first tiles of a constant weight before
the wait for the kernel that writes x (`pdl.py`): a ring fills while a norm or an activation computes x. A warpgroup
multiplies. One program fits a multiprocessor, so the last wave of programs should be a full one.

The product is transposed: a warpgroup multiplies 64 rows, which are rows of the weight, and its columns are rows of x. The
64 rows are two halves of 32, copied one by one:

    outputs   both halves are outputs, of the same inputs
    inputs    the halves are the same outputs, of inputs next to each other; the columns have both inputs too, and of the
              four quarters of the product the two that belong together are added. There are twice as many programs, which
              may fill the last wave
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

from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.dispatch import is_hopper, on_gpu
from mla_router.worker.kernels.pdl import launch_options, reads_early, wait_for_previous

MAX_ROWS = 64
# Rows from which programs read so much of x that the library is faster, unless there are few outputs for many inputs
MANY_ROWS = 33
LARGE = 1 << 24  # numbers of the smallest weight: that of a square layer with 4,096 inputs
HALF = 32  # rows of a copied tile of the weight
DEPTH = 64  # inputs of a copied tile: 128 bytes of a row, and four steps of a tensor core
RING_BYTES = 200 << 10  # of a program: the kernels between two products fit beside it
REGISTERS = 128  # of a thread: a norm's programs start beside a program of eight warps
PRODUCER_REGISTERS = 24
_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def suits_hopper(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel serves the product of x [T, K] and weight [N, K], and is faster than the library's."""
    rows, (outputs, inputs) = len(x), weight.shape
    if not on_gpu(x) or not is_hopper(x.device) or x.dtype != weight.dtype:
        return False
    if not 1 < rows <= MAX_ROWS or outputs * inputs < LARGE:
        return False
    if rows >= MANY_ROWS and inputs <= outputs:
        return False
    tensors = (x, weight)
    return all(
        tensor.stride(1) == 1
        and tensor.data_ptr() % 16 == 0
        and tensor.stride(0) * tensor.itemsize % 16 == 0
        for tensor in tensors
    )


def linear_hopper(
    x: Tensor,
    weight: Tensor,
    *,
    out_dtype: torch.dtype,
    constant: bool = False,
    split: int = 0,
) -> Tensor:
    """Returns x @ weight.T [T, N] of operands that `suits_hopper`. With `constant` the weight is read before the wait
    (`pdl.py`). `split`: 1 if halves are outputs, 2 if they are inputs; 0: chosen by the number of outputs."""
    (rows, inputs), outputs = x.shape, len(weight)
    assert 0 < rows <= MAX_ROWS and weight.shape[1] == inputs, (
        f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
    )
    split = split or _split(outputs, limits(x.device).multiprocessors)
    columns = max(triton.next_power_of_2(rows), 8)
    steps = triton.cdiv(inputs, split * DEPTH)
    tile_bytes = 2 * DEPTH * (2 * HALF + split * columns)
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    _linear_kernel[(triton.cdiv(outputs, 2 * HALF // split),)](
        _tiles(x, columns),
        _tiles(weight, HALF),
        out,
        rows,
        N=outputs,
        SPLIT=split,
        STEPS=steps,
        STAGES=min(RING_BYTES // tile_bytes, steps),
        AHEAD=constant,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        maxnreg=REGISTERS,
        **launch_options(),
    )
    return out


def _split(outputs: int, multiprocessors: int) -> int:
    """Returns 2 if the programs with half as many outputs then take less time, in whole waves."""
    wide, narrow = (
        triton.cdiv(outputs, each * multiprocessors) * each for each in (2 * HALF, HALF)
    )
    return 2 if narrow < wide else 1


def _tiles(matrix: Tensor, rows: int) -> TensorDescriptor:
    layout = _layout(rows, matrix.dtype)
    return TensorDescriptor(
        matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, DEPTH], layout
    )


@cache
def _layout(rows: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, DEPTH], _ELEMENTS[dtype])


@reads_early({"AHEAD": ("weight",)})
@gluon.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x,
    weight,
    out,
    rows,
    N: gl.constexpr,
    SPLIT: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    HALF: gl.constexpr = weight.block_type.shape[0]
    DEPTH: gl.constexpr = weight.block_type.shape[1]
    ROWS: gl.constexpr = x.block_type.shape[0]
    weights = gl.allocate_shared_memory(weight.dtype, [2 * STAGES, HALF, DEPTH], weight.layout)
    activations = gl.allocate_shared_memory(x.dtype, [SPLIT * STAGES, ROWS, DEPTH], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    ring = weights, activations, full, empty
    gl.warp_specialize(
        [
            (_consume, (ring, out, rows, N, SPLIT, STEPS)),
            (_produce, (ring, weight, x, SPLIT, STEPS, AHEAD)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(
    ring,
    weight,
    x,
    SPLIT: gl.constexpr,
    STEPS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Copies the tiles of all inputs."""
    full, empty = ring[2], ring[3]
    STAGES: gl.constexpr = full.shape[0]
    BYTES: gl.constexpr = 2 * weight.block_type.nbytes + SPLIT * x.block_type.nbytes
    if not AHEAD:
        wait_for_previous()
    for step in gl.static_range(STAGES):
        mbarrier.expect(full.index(step), BYTES)
        _copy_weight(ring, weight, step, step, SPLIT)
    if AHEAD:
        wait_for_previous()
    for step in gl.static_range(STAGES):
        _copy_rows(ring, x, step, step, SPLIT)
    for step in range(STAGES, STEPS):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        _copy_weight(ring, weight, step, stage, SPLIT)
        _copy_rows(ring, x, step, stage, SPLIT)


@gluon.jit
def _copy_weight(ring, weight, step, stage, SPLIT: gl.constexpr):
    weights, full = ring[0], ring[2]
    HALF: gl.constexpr = weights.shape[1]
    DEPTH: gl.constexpr = weights.shape[2]
    for half in gl.static_range(2):
        if SPLIT == 1:
            row, column = (2 * gl.program_id(0) + half) * HALF, step * DEPTH
        else:
            row, column = gl.program_id(0) * HALF, (2 * step + half) * DEPTH
        tma.async_copy_global_to_shared(
            weight, [row, column], full.index(stage), weights.index(2 * stage + half)
        )


@gluon.jit
def _copy_rows(ring, x, step, stage, SPLIT: gl.constexpr):
    activations, full = ring[1], ring[2]
    DEPTH: gl.constexpr = activations.shape[2]
    for i in gl.static_range(SPLIT):
        tma.async_copy_global_to_shared(
            x,
            [0, (SPLIT * step + i) * DEPTH],
            full.index(stage),
            activations.index(SPLIT * stage + i),
        )


@gluon.jit
def _consume(
    ring,
    out,
    rows,
    N: gl.constexpr,
    SPLIT: gl.constexpr,
    STEPS: gl.constexpr,
):
    """Multiplies tile after tile, and stores the result."""
    weights, activations, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    HALF: gl.constexpr = weights.shape[1]
    DEPTH: gl.constexpr = weights.shape[2]
    ROWS: gl.constexpr = activations.shape[1]
    COLUMNS: gl.constexpr = SPLIT * ROWS
    DTYPE: gl.constexpr = weights.dtype
    of_weights: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * HALF, DEPTH], DTYPE)
    of_rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, DEPTH], DTYPE)
    both = weights._reinterpret(DTYPE, [STAGES, 2 * HALF, DEPTH], of_weights)
    columns = activations._reinterpret(DTYPE, [STAGES, COLUMNS, DEPTH], of_rows)
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    wait_for_previous()
    sums = gl.zeros([2 * HALF, COLUMNS], gl.float32, product)
    mbarrier.wait(full.index(0), 0)
    sums = warpgroup_mma(both.index(0), columns.index(0).permute((1, 0)), sums, is_async=True)
    sums = warpgroup_mma_wait(1, deps=[sums])
    for step in range(1, STEPS):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        sums = warpgroup_mma(
            both.index(stage), columns.index(stage).permute((1, 0)), sums, is_async=True
        )
        sums = warpgroup_mma_wait(1, deps=[sums])
        mbarrier.arrive(empty.index((step - 1) % STAGES))
    sums = warpgroup_mma_wait(0, deps=[sums])

    result = sums
    if SPLIT == 2:
        half = gl.arange(0, 2 * HALF, gl.SliceLayout(1, product)) // HALF
        of = gl.arange(0, COLUMNS, gl.SliceLayout(0, product)) // ROWS
        belongs = gl.expand_dims(half, 1) == gl.expand_dims(of, 0)
        quarters = gl.where(belongs, sums, 0.0).reshape([2, HALF, 2, ROWS])
        result = gl.sum(gl.sum(quarters, 2), 0)
    OUTPUTS: gl.constexpr = result.shape[0]
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [OUTPUTS // 8, 256 // OUTPUTS], [1, 4], [0, 1])
    result = gl.convert_layout(result.to(out.dtype.element_ty), stored)
    output = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, stored))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, stored))
    at = out + gl.expand_dims(row.to(gl.int64) * N, 0) + gl.expand_dims(output, 1)
    gl.store(at, result, gl.expand_dims(row < rows, 0) & gl.expand_dims(output < N, 1))
