"""x @ weight.T for 2 to 8 rows and not too many outputs.

A program has a few outputs and all of their inputs, which fit on chip: so it reads its whole share of a
constant weight while it waits for the kernel that makes x (`pdl.py`), all loads under way at once. A
library's kernel begins with its first load when x is there, and few of its programs have work.

Products of a warp that add to one sum wait for each other. So the inputs are cut into a piece for each
warp, with a sum of its own, and the sums are added at the end.
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

# Beyond the first two the library is as fast on an H200 (`bench/kernels/bench_linear.py`), and weights of more
# inputs would leave room for one program only on a multiprocessor.
MAX_ROWS, MAX_OUTPUTS, MAX_INPUTS = 8, 4096, 3072


class Tiles(NamedTuple):
    outputs: int  # of a program, at least the 16 that a tensor core takes at once
    depth: int  # inputs of a piece
    num_warps: int


def is_few(x: Tensor, weight: Tensor) -> bool:
    """Whether our kernel is for the product of x [T, K] and weight [N, K]."""
    outputs, inputs = weight.shape
    if not on_gpu(x) or not 1 < x.shape[0] <= MAX_ROWS:
        return False
    if outputs > MAX_OUTPUTS or inputs > MAX_INPUTS:
        return False
    return shared_bytes(inputs) <= limits(x.device).shared_bytes


def tiling(inputs: int) -> Tiles:
    """The best that the bench's sweep found on an H200, but for fewer inputs."""
    warps = 4
    depth = triton.next_power_of_2(triton.cdiv(inputs, warps))
    return Tiles(16, min(max(depth, 16), 256), warps)


def shared_bytes(inputs: int) -> int:
    """Shared memory of a program with 16-bit numbers: all of its weights, and the x of one step."""
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
    """As `linear` without a bias: x [T, K] of at most MAX_ROWS rows, contiguous in the last axis, and weight
    [N, K] of at most MAX_INPUTS inputs. `tiles` is for measuring others than `tiling`'s."""
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
    """A step has DEPTH inputs of each of PIECES, which are the first axis of what has three."""
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
        # Outputs before rows: a tensor core takes 16 of one and 8 of the other
        acc = tl.dot(w[step], tl.permute(a, (0, 2, 1)), acc, input_precision="ieee")
    tl.store(
        out + row.to(tl.int64)[None, :] * OUTPUTS + output[:, None],
        tl.sum(acc, 0).to(out.dtype.element_ty),
        (row < rows)[None, :] & (output < OUTPUTS)[:, None],
    )


@triton.jit
def _step(at, column, exists, INPUTS: tl.constexpr):
    """[PIECES, rows, DEPTH]"""
    mask = exists[None, :, None] & (column < INPUTS)[:, None, :]
    return tl.load(at + column[:, None, :], mask, other=0.0)
