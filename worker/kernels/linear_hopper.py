"""x @ weight.T for 2 to 64 rows and a large 16-bit weight, for Hopper's tensor cores (sm_90), in Gluon.

A program is five warps: one copies tiles to a ring (`hopper_ring.py`), and a warpgroup multiplies. One program fits a
multiprocessor, so the last wave of programs should be a full one.
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

from mla_router.worker.kernels import hopper_ring as ring_of
from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.dispatch import is_hopper, on_gpu
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

MAX_ROWS = 64
# Rows from which programs read so much of x that the library is faster, unless there are few outputs for many inputs
MANY_ROWS = 33
LARGE = 1 << 24  # numbers of the smallest weight: that of a square layer with 4,096 inputs
SPLITS = (1, 2)
RING_BYTES = 200 << 10  # of a program: the kernels between two products fit beside it
REGISTERS = 128  # of a thread: a norm's programs start beside a program of eight warps


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
    (`pdl.py`). `split`: parts of the inputs (`hopper_ring.py`); 0: chosen by the number of outputs."""
    (rows, inputs), outputs = x.shape, len(weight)
    assert 0 < rows <= MAX_ROWS and weight.shape[1] == inputs, (
        f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
    )
    split = split or ring_of.full_waves(outputs, SPLITS, limits(x.device).multiprocessors)
    columns = ring_of.padded_rows(rows)
    steps = ring_of.steps_of(inputs, x.itemsize, split)
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    _linear_kernel[(ring_of.programs(outputs, split),)](
        ring_of.tiles_of(x, columns),
        ring_of.tiles_of(weight, PRODUCT_ROWS // split),
        out,
        rows,
        N=outputs,
        SPLIT=split,
        STEPS=steps,
        STAGES=min(RING_BYTES // ring_of.tile_bytes(columns, split), steps),
        AHEAD=constant,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        maxnreg=REGISTERS,
        **launch_options(),
    )
    return out


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
    ring = empty_ring(weight, x, SPLIT, STAGES)
    gl.warp_specialize(
        [
            (_consume, (ring, out, rows, N, SPLIT, STEPS)),
            (fill, (ring, weight, x, SPLIT, STEPS, AHEAD)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


@gluon.jit
def _consume(ring, out, rows, N: gl.constexpr, SPLIT: gl.constexpr, STEPS: gl.constexpr):
    """Multiplies tile after tile, and stores the result."""
    full, empty = ring[2], ring[3]
    STAGES: gl.constexpr = full.shape[0]
    weights, columns = operands(ring)
    HEIGHT: gl.constexpr = weights.shape[1]
    COLUMNS: gl.constexpr = columns.shape[1]
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    wait_for_previous()
    sums = gl.zeros([HEIGHT, COLUMNS], gl.float32, product)
    mbarrier.wait(full.index(0), 0)
    sums = warpgroup_mma(weights.index(0), columns.index(0).permute((1, 0)), sums, is_async=True)
    sums = warpgroup_mma_wait(1, deps=[sums])
    for step in range(1, STEPS):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        sums = warpgroup_mma(
            weights.index(stage), columns.index(stage).permute((1, 0)), sums, is_async=True
        )
        sums = warpgroup_mma_wait(1, deps=[sums])
        mbarrier.arrive(empty.index((step - 1) % STAGES))
    sums = warpgroup_mma_wait(0, deps=[sums])
    store_transposed(add_parts(sums, SPLIT, product), out, rows, N)
