"""The experts' first matrix product over sorted blocks of rows: gate and up, with silu(gate) * up in the
epilogue. Gate and up themselves are not written to memory.

Weights are read by the tensor memory accelerator: one thread requests a tile. Rows of gate and of up become the halves
of one operand, so one product serves both, and the tensor cores read the tile of rows once.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_router.worker.kernels.moe.align import Blocks, block_rows
from mla_router.worker.kernels.moe.gemm_programs import (
    block_and_column,
    block_arguments,
    programs_with_turns,
    shared_tile,
    tile_constants,
    turn_of,
)
from mla_router.worker.kernels.moe.tiling import Tile
from mla_router.worker.kernels.pdl import wait_for_previous


class Gated(NamedTuple):
    """silu(gate) * up of the rows of blocks, [blocks.intermediate_rows, I], without padding, which is not written; and of
    all tokens for the shared experts, [T, S]."""

    rows: Tensor
    shared: Tensor | None = None


@triton.jit
def _gated(
    rows_at,
    real,
    weight,
    expert,
    first,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns silu(gate) * up [ROWS, BLOCK_N] float32 of the rows at `rows_at` [ROWS, BLOCK_K] that are `real`, from
    column `first` of an expert on."""
    k = tl.arange(0, BLOCK_K)
    sums = tl.zeros((ROWS, 2 * BLOCK_N), tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        inside = real[:, None]
        if HIDDEN % BLOCK_K:
            inside &= (start + k < HIDDEN)[None, :]
        a = tl.load(rows_at + start, inside, other=0.0)
        gate_and_up = weight.load([expert, 0, first, start]).reshape(2 * BLOCK_N, BLOCK_K)
        sums = tl.dot(a, gate_and_up.T, sums, input_precision="ieee")
    gate, up = sums.reshape(ROWS, 2, BLOCK_N).permute(0, 2, 1).split()
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit(
    do_not_specialize=["max_blocks", "num_pairs", "group_m", "shared_programs", "shared_every"]
)
def _gate_up_gemm(
    x,
    weight,
    out,
    shared,
    shared_out,
    ids,
    pairs,
    experts,
    block_count,
    max_blocks,
    num_pairs,
    group_m,
    shared_programs,
    shared_every,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes BLOCK_N of WIDTH columns of out[row] = silu(gate) * up of x[pair[row] // TOP_K], or of shared_out[row] from
    x[row]."""
    wait_for_previous()
    k = tl.arange(0, BLOCK_K)
    n = tl.arange(0, BLOCK_N)
    program = tl.program_id(0)
    if shared is not None:
        is_shared, program = turn_of(program, shared_every, shared_programs)
        if is_shared:
            tokens = num_pairs // TOP_K
            row, first = shared_tile(program, tokens, ROWS, BLOCK_N)
            token = (row + tl.arange(0, ROWS)).to(tl.int64)
            real = token < tokens
            x_at = x + tl.where(real, token, 0)[:, None] * HIDDEN + k[None, :]
            gated = _gated(x_at, real, shared, 0, first, HIDDEN, ROWS, BLOCK_N, BLOCK_K)
            at = shared_out + token[:, None] * SHARED_WIDTH + (first + n)[None, :]
            inside = real[:, None] & (first + n < SHARED_WIDTH)[None, :]
            tl.store(at, gated.to(out.dtype.element_ty), inside)
            return

    COLUMNS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    block, column = block_and_column(program, max_blocks, COLUMNS, group_m)
    expert, pair, rows, exists = block_rows(
        block, ids, pairs, experts, block_count, max_blocks, num_pairs, TOP_K, BLOCK_TOP_K, ROWS
    )
    if not exists:
        return
    real = pair < num_pairs
    first = column * BLOCK_N
    x_at = x + tl.where(real, pair // TOP_K, 0).to(tl.int64)[:, None] * HIDDEN + k[None, :]
    gated = _gated(x_at, real, weight, expert.to(tl.int32), first, HIDDEN, ROWS, BLOCK_N, BLOCK_K)
    at = out + rows[:, None] * WIDTH + (first + n)[None, :]
    tl.store(at, gated.to(out.dtype.element_ty), real[:, None] & (first + n < WIDTH)[None, :])


def gate_up_blocks(
    x: Tensor, gate_up: Tensor, blocks: Blocks, tile: Tile, shared: Tensor | None = None
) -> Gated:
    """Returns silu(gate) * up in x's dtype. x [T, N] contiguous, gate_up [E, 2I, N], shared [2S, N]. Rows of weights are
    multiples of 16 bytes."""
    _, double, hidden = gate_up.shape
    shared_width = 0 if shared is None else len(shared) // 2
    out = x.new_empty(blocks.intermediate_rows, double // 2)
    shared_out = None if shared is None else x.new_empty(len(x), shared_width)
    programs, turns = programs_with_turns(blocks, double // 2, shared_width, tile)
    _gate_up_gemm[(programs,)](
        x,
        _halves(gate_up, tile),
        out,
        None if shared is None else _halves(shared[None], tile),
        shared_out,
        *block_arguments(blocks),
        tile.group_m,
        *turns,
        HIDDEN=hidden,
        WIDTH=double // 2,
        SHARED_WIDTH=shared_width,
        **tile_constants(blocks, tile),
    )
    return Gated(out, shared_out)


def _halves(gate_up: Tensor, tile: Tile) -> TensorDescriptor:
    """Returns a descriptor of gate_up [E, 2I, N] whose tiles have as many rows of gate as of up."""
    experts, double, hidden = gate_up.shape
    halves = gate_up.view(experts, 2, double // 2, hidden)
    return TensorDescriptor.from_tensor(halves, [1, 2, tile.block_n, tile.block_k])
