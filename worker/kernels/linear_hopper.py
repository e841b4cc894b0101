"""x @ weight.T for few rows and a 16-bit weight, for Hopper's tensor cores (sm_90), in Gluon.

A program is five warps: one copies tiles to a ring (`hopper_ring.py`), and a warpgroup multiplies. Few programs have a
multiprocessor each, and a large ring. Of more programs two fit a multiprocessor, so that one reads while another ends.
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
FEW_ROWS = 8
# Numbers of the smallest weight for one row, for FEW_ROWS and for more. Smaller ones are joined with a norm
# (`norm_linear.py`) or streamed by programs of few outputs (`linear.py`, `few_rows.py`), and one row of FEW_INPUTS as well
SMALLEST_OF_ONE, SMALLEST_OF_FEW, SMALLEST = 6144 * 4096, 12 << 20, 1 << 22
FEW_INPUTS = 2048
# Of a program that has a multiprocessor to itself: the kernels between two products fit beside it
RING_BYTES = 200 << 10
HALF_RING_BYTES = 104 << 10  # of one of two
REGISTERS = 128  # of a thread: a norm's programs start beside a program of eight warps


class Tiling(NamedTuple):
    split: int  # parts of the inputs (`hopper_ring.py`)
    ring_bytes: int


def tiling(rows: int, outputs: int, multiprocessors: int) -> Tiling:
    """Returns the fastest tiling of a sweep on an H200 (docs/design/kernel_choices.md)."""
    halves_fit = 2 * ring_of.programs(outputs, 1) <= multiprocessors
    split = 2 if halves_fit or rows <= FEW_ROWS else 1
    is_one_wave = ring_of.programs(outputs, split) <= multiprocessors
    return Tiling(split, RING_BYTES if is_one_wave else HALF_RING_BYTES)


def suits_hopper(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel serves the product of x [T, K] and weight [N, K], and is faster than the others."""
    if not on_gpu(x) or x.dtype != weight.dtype or not is_fastest(x, *weight.shape):
        return False
    tensors = (x, weight)
    return all(
        tensor.stride(1) == 1
        and tensor.data_ptr() % 16 == 0
        and tensor.stride(0) * tensor.itemsize % 16 == 0
        for tensor in tensors
    )


def is_fastest(x: Tensor, outputs: int, inputs: int) -> bool:
    """Whether the kernel is the fastest for the rows of x, which are on a GPU, and so large a weight."""
    rows, numbers = len(x), outputs * inputs
    if not is_hopper(x.device) or not 0 < rows <= MAX_ROWS:
        return False
    if rows == 1:
        return numbers >= SMALLEST_OF_ONE and inputs > FEW_INPUTS
    return numbers >= (SMALLEST_OF_FEW if rows <= FEW_ROWS else SMALLEST)


def linear_hopper(
    x: Tensor,
    weight: Tensor,
    *,
    out_dtype: torch.dtype,
    constant: bool = False,
    tiles: Tiling | None = None,
) -> Tensor:
    """Returns x @ weight.T [T, N] of operands that `suits_hopper`. With `constant` the weight is read before the wait
    (`pdl.py`). `tiles` replaces `tiling`, for benchmarks."""
    (rows, inputs), outputs = x.shape, len(weight)
    assert 0 < rows <= MAX_ROWS and weight.shape[1] == inputs, (
        f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
    )
    split, ring_bytes = tiles or tiling(rows, outputs, limits(x.device).multiprocessors)
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
        STAGES=min(ring_bytes // ring_of.tile_bytes(columns, split), steps),
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
