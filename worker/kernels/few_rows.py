"""x @ weight.T for 2 to 8 rows and at most a few thousand outputs.

A program computes a few outputs from all inputs. Its part of the weight fits on chip, so it reads all of it while it
waits for the kernel that writes x (`pdl.py`). A library's kernel starts to load when x is there, and few of its
programs have work.

Products of one warp that add to the same sum wait for each other. So each warp has its own piece of the inputs and
its own sum, and the sums are added at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.pdl import launch_options, reads_early, wait_for_previous

# With more rows or outputs the library is as fast on an H200 (`bench/kernels/bench_linear.py`). With more inputs only
# one program would fit a multiprocessor.
MAX_ROWS, MAX_OUTPUTS, MAX_INPUTS = 8, 4096, 3072


class Tiles(NamedTuple):
    outputs: int  # outputs of a program, at least the 16 rows of a tensor core's tile
    depth: int  # inputs of a piece in one step
    num_warps: int


def is_few(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel serves the product of x [T, K] and weight [N, K]."""
    outputs, inputs = weight.shape
    if not on_gpu(x) or not 1 < x.shape[0] <= MAX_ROWS:
        return False
    if outputs > MAX_OUTPUTS or inputs > MAX_INPUTS:
        return False
    return shared_bytes(inputs) <= limits(x.device).shared_bytes


def tiling(inputs: int) -> Tiles:
    """Returns the fastest tiles of a sweep on an H200 (`bench_linear.py`), with a smaller depth for few inputs."""
    warps = 4
    depth = triton.next_power_of_2(triton.cdiv(inputs, warps))
    return Tiles(16, min(max(depth, 16), 256), warps)


def shared_bytes(inputs: int) -> int:
    """Returns the shared memory of a program with 16-bit numbers: all of its weights, and x of one step."""
    tiles = tiling(inputs)
    step = tiles.num_warps * tiles.depth
    return 2 * step * (-(-inputs // step) * tiles.outputs + MAX_ROWS)


def few_rows_linear(
    x: Tensor,
    weight: Tensor,
    *,
    out_dtype: torch.dtype,
    constant: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """Returns x @ weight.T [T, N] for x [T, K], T <= MAX_ROWS, contiguous in the last axis, and weight [N, K],
    K <= MAX_INPUTS. With `constant` the weight is read before the wait (`pdl.py`). `tiles` replaces `tiling`, for
    benchmarks."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert weight.shape == (outputs, inputs) and weight.is_contiguous() and x.stride(1) == 1, (
        f"x {tuple(x.shape)} {x.stride()}, weight {tuple(weight.shape)} {weight.stride()}"
    )
    assert 0 < rows <= MAX_ROWS and inputs <= MAX_INPUTS, f"{rows} rows of {inputs}"
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    tiles = tiles or tiling(inputs)
    _few_rows_kernel[(triton.cdiv(outputs, tiles.outputs),)](
        x,
        weight,
        out,
        rows,
        x.stride(0),
        OUTPUTS=outputs,
        INPUTS=inputs,
        BLOCK_ROWS=MAX_ROWS,
        BLOCK_OUTPUTS=tiles.outputs,
        PIECES=tiles.num_warps,
        DEPTH=tiles.depth,
        STEPS=triton.cdiv(inputs, tiles.num_warps * tiles.depth),
        AHEAD=constant,
        num_warps=tiles.num_warps,
        **launch_options(),
    )
    return out


@reads_early({"AHEAD": ("weight",)})
@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x,
    weight,
    out,
    rows,
    x_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    PIECES: tl.constexpr,
    DEPTH: tl.constexpr,
    STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A step takes DEPTH inputs of each piece. Pieces are the first axis of tensors with three."""
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    row = tl.arange(0, BLOCK_ROWS)
    weight_at = weight + output.to(tl.int64)[None, :, None] * INPUTS
    x_at = x + row.to(tl.int64)[None, :, None] * x_stride
    column = tl.arange(0, PIECES)[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    if not AHEAD:
        wait_for_previous()
    w = tl.tuple(())
    for step in tl.static_range(STEPS):
        w += (_step(weight_at, column + step * PIECES * DEPTH, output < OUTPUTS, INPUTS),)
    if AHEAD:
        wait_for_previous()
    acc = tl.zeros([PIECES, BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    for step in tl.static_range(STEPS):
        a = _step(x_at, column + step * PIECES * DEPTH, row < rows, INPUTS)
        # Outputs are the first operand: a tensor core takes 16 rows of the first and 8 of the second
        acc = tl.dot(w[step], tl.permute(a, (0, 2, 1)), acc, input_precision="ieee")
    tl.store(
        out + row.to(tl.int64)[None, :] * OUTPUTS + output[:, None],
        tl.sum(acc, 0).to(out.dtype.element_ty),
        (row < rows)[None, :] & (output < OUTPUTS)[:, None],
    )


@triton.jit
def _step(at, column, exists, INPUTS: tl.constexpr):
    """Returns [PIECES, rows, DEPTH] of the rows at `at` [1, rows, 1], zeros where none exist."""
    mask = exists[None, :, None] & (column < INPUTS)[:, None, :]
    return tl.load(at + column[:, None, :], mask, other=0.0)
