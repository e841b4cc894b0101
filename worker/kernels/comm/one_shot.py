"""Collectives of few rows between the GPUs of a machine, in one kernel each, over memory that all ranks map.

NCCL's collectives take 14 to 22 us in a decode step, and a sum of a few rows over NVLink is a matter of 3 us. Here each
rank writes its rows straight into the memory of the others and waits for theirs, as in TensorRT-LLM's one-shot
"Lamport" all-reduce. There is no barrier and no flag: memory without a row holds -0.0 everywhere, and a row has arrived
when it holds no -0.0. So a row that is sent has 0.0 in place of -0.0.

Program p of a call takes the p-th row of each rank and nothing else, so rows need no order among each other. Each row has
three generations of slots, used in turn. Call n of a row fills generation n % 3 and empties that of call n - 1. The
next call to fill that is n + 2. A peer comes to it after it has received call n + 1 of this rank, and this rank has
sent that after the end of its call n. All ranks must make the same calls, which is the rule for all collectives
(`group.py`).

Each rank adds in the order of the ranks in float32, so all have the same bits. With `norm` the sum, rounded to x's
dtype, goes on to `add_rms_norm` in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.kernels.rms_norm import normalized, tiling

GENERATIONS = 3
EMPTY = tl.constexpr(-0x8000)  # the bits of -0.0 in bfloat16 and float16
# By each rank in a call: 2 ranks take 128 rows of 7,168, 8 ranks 20
MAX_SENT_BYTES = 2 << 20


class Mailboxes(NamedTuple):
    """The memory of one rank of `size`, for rows of 16-bit floats.

    `slots` [GENERATIONS, rows, size, width] 16-bit: for each row, one slot for each sender. `addresses` [size] int64:
    those of the slots of all ranks in this process. `turns` [rows] int32: of each row, the width of its last call in
    multiples of 8, times 4, plus the generation of its next call.
    """

    rank: int
    slots: Tensor
    addresses: Tensor
    turns: Tensor

    @property
    def size(self) -> int:
        return self.slots.shape[2]

    def serve(self, x: Tensor, rows: int) -> bool:
        """Whether a call that sends `rows` rows of `x` to each rank is one for these mailboxes."""
        if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16):
            return False
        width = x.shape[1]
        fits = 0 < rows <= self.slots.shape[1] and width <= self.slots.shape[3]
        sent = 2 * rows * width * (self.size - 1)
        return fits and sent <= MAX_SENT_BYTES and x.stride(1) == 1


def clear(slots: Tensor, turns: Tensor) -> None:
    """Prepares the memory of a rank, before any rank sends."""
    slots.view(torch.int16).fill_(EMPTY.value)
    turns.zero_()


def sum_rows(boxes: Mailboxes, x: Tensor) -> Tensor:
    """Replaces x [T, N] by its sum over the ranks, and returns it."""
    return _launch(boxes, x, len(x), out=x)


def sum_add_norm(
    boxes: Mailboxes, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns add_rms_norm of the sum of x [T, N] over the ranks."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(boxes, x, len(x), out=out, norm=(residual, weight, eps, total))
    return out, total


def gather_rows(boxes: Mailboxes, x: Tensor) -> Tensor:
    """Returns the rows [size T, N] of all ranks. x [T, N]."""
    return _launch(boxes, x, len(x), out=x.new_empty(boxes.size * len(x), x.shape[1]), gather=True)


def scatter_rows(boxes: Mailboxes, x: Tensor) -> Tensor:
    """Returns this rank's rows [T, N] of the sum of x [size T, N] over the ranks."""
    rows = len(x) // boxes.size
    return _launch(boxes, x, rows, out=x.new_empty(rows, x.shape[1]), scatter=True)


def _launch(
    boxes: Mailboxes,
    x: Tensor,
    rows: int,
    *,
    out: Tensor,
    gather: bool = False,
    scatter: bool = False,
    norm: tuple[Tensor, Tensor, float, Tensor] | None = None,
) -> Tensor:
    width = x.shape[1]
    residual, weight, eps, total = norm or (x, x, 0.0, x)
    assert boxes.serve(x, rows), f"{rows} rows of {width}, slots {tuple(boxes.slots.shape)}"
    assert residual.stride(1) == 1 and residual.dtype == weight.dtype == x.dtype, (
        f"x {x.dtype}, residual {residual.stride()} {residual.dtype}, weight {weight.dtype}"
    )
    block, warps = tiling(width)
    _one_shot_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        total,
        boxes.addresses,
        boxes.turns,
        rows,
        x.stride(0),
        residual.stride(0),
        eps,
        RANK=boxes.rank,
        SIZE=boxes.size,
        ROWS=boxes.slots.shape[1],
        SLOT=boxes.slots.shape[3],
        N=width,
        BLOCK=block,
        GATHER=gather,
        SCATTER=scatter,
        NORM=norm is not None,
        num_warps=warps,
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _one_shot_kernel(
    x,
    residual,
    weight,
    out,
    total,
    addresses,
    turns,
    rows,
    x_stride,
    residual_stride,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SLOT: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    NORM: tl.constexpr,
):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    turn = tl.load(turns + row)
    generation = turn % 4
    used = tl.multiple_of(turn // 4, 8)
    sent = x + row * x_stride + column
    if SCATTER:
        own = filled(tl.load(sent + RANK * rows * x_stride, inside, other=0.0))
    else:
        own = filled(tl.load(sent, inside, other=0.0))
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = slot(addresses, peer, x.dtype, generation, row, RANK, ROWS, SIZE, SLOT)
            values = own
            if SCATTER:
                values = filled(tl.load(sent + peer * rows * x_stride, inside, other=0.0))
            tl.store(theirs + column, values, inside, cache_modifier=".wt")
    # While the others' rows are on their way
    for sender in tl.static_range(SIZE):
        if sender != RANK:
            last = slot(
                addresses, RANK, x.dtype, (generation + 2) % 3, row, sender, ROWS, SIZE, SLOT
            )
            for start in range(0, used, BLOCK):
                nothing = tl.full((BLOCK,), EMPTY, tl.int16).to(x.dtype.element_ty, bitcast=True)
                tl.store(last + start + column, nothing, start + column < used)
    acc = tl.zeros((BLOCK,), tl.float32)
    for sender in range(SIZE):  # one at a time: the rows of many ranks do not fit into registers
        values = own
        if sender != RANK:
            mine = slot(addresses, RANK, x.dtype, generation, row, sender, ROWS, SIZE, SLOT)
            values = tl.load(mine + column, inside, other=0.0, volatile=True)
            while tl.max(is_empty(values).to(tl.int32), 0) > 0:
                values = tl.load(mine + column, inside, other=0.0, volatile=True)
        if GATHER:
            tl.store(out + (sender * rows + row) * N + column, values, inside)
        else:
            acc += values.to(tl.float32)
    if not GATHER:
        summed = acc.to(x.dtype.element_ty)
        if NORM:
            more = tl.load(residual + row * residual_stride + column, inside, other=0.0)
            summed = (summed.to(tl.float32) + more.to(tl.float32)).to(summed.dtype)
            tl.store(total + row * N + column, summed, inside)
            scale = tl.load(weight + column, inside, other=0.0)
            tl.store(out + row * N + column, normalized(summed, scale, eps, N), inside)
        else:
            tl.store(out + row * N + column, summed, inside)
    tl.store(turns + row, (N + 7) // 8 * 32 + (generation + 1) % 3)


@triton.jit
def slot(
    addresses,
    rank,
    dtype,
    generation,
    row,
    sender,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    SLOT: tl.constexpr,
):
    """Returns the slot of `sender` for a row in the memory of `rank`."""
    start = tl.multiple_of(tl.load(addresses + rank).to(dtype), 16)
    return start + ((generation * ROWS + row) * SIZE + sender) * SLOT


@triton.jit
def is_empty(values):
    return values.to(tl.int16, bitcast=True) == EMPTY


@triton.jit
def filled(values):
    """Returns `values` with 0.0 in place of -0.0."""
    return tl.where(is_empty(values), 0.0, values).to(values.dtype)
