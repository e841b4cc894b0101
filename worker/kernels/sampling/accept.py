"""Accepts drafts of speculative decoding (Leviathan et al., 2023, arXiv:2211.17192) that equal the model's own tokens.

Row i of a slot has the model's token after its last token and i drafts. A sampled token is a function of logits, seed
and position alone (`sample.py`), so the rows up to the first draft that differs from the model's token have what the
model would have drawn without drafts. No other rule of acceptance keeps the text the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.step.result import UNUSED


def accept(
    sampled: Tensor,
    slots: Tensor,
    bounds: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    out: Tensor,
    last_rows: Tensor,
) -> None:
    """Takes the tokens that S slots gained in a step.

    The first D slots have n + 1 adjacent rows, for their last token and n drafts; the others have one row, after those.
    `sampled` [D * (n + 1) + S - D] int32: the model's token of each row, or NO_TOKEN. `slots` [S] int64, distinct.
    `bounds` [D] int64: upper bounds of the slots' tokens in the KV cache; rows beyond are idle, and their drafts are
    not accepted.
    `drafts` [all slots, at least n] int64.

    Writes the gained tokens to `out` [S, n + 1] int32, with UNUSED after them; it may be pinned memory of the host.
    Writes the row of the last one to `last_rows` [S] int64, and, by slot, its token to `last_token` [all slots] int64
    (0 for NO_TOKEN). Adds their number to `lengths` [all slots] int32, the tokens of the slots before the step.
    """
    op = accept_triton if sampled.is_cuda else accept_torch
    op(sampled, slots, bounds, drafts, lengths, last_token, out, last_rows)


def accept_torch(
    sampled: Tensor,
    slots: Tensor,
    bounds: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    out: Tensor,
    last_rows: Tensor,
) -> None:
    decodes, rows = len(bounds), out.shape[1]
    own, others = sampled[: decodes * rows].view(decodes, rows), sampled[decodes * rows :]
    of = slots[:decodes]
    ranks = torch.arange(rows, device=sampled.device)
    room = bounds - lengths[of]
    right = (own[:, :-1] == drafts[of, : rows - 1]) & (ranks[:-1] < room[:, None])
    accepted = right.long().cumprod(dim=1).sum(dim=1)
    out.fill_(UNUSED)
    out[:decodes] = torch.where(ranks <= accepted[:, None], own, UNUSED)
    out[decodes:, 0] = others
    last_rows[:decodes] = torch.arange(decodes, device=sampled.device) * rows + accepted
    last_rows[decodes:] = torch.arange(decodes * rows, len(sampled), device=sampled.device)
    last_token[slots] = sampled[last_rows].long().clamp_min(0)
    lengths[of] += (accepted + 1).to(lengths.dtype)
    lengths[slots[decodes:]] += 1


def accept_triton(
    sampled: Tensor,
    slots: Tensor,
    bounds: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    out: Tensor,
    last_rows: Tensor,
) -> None:
    decodes, (count, rows) = len(bounds), out.shape
    assert len(sampled) == decodes * rows + count - decodes and drafts.shape[1] >= rows - 1, (
        f"sampled {tuple(sampled.shape)}, {decodes} bounds, out {tuple(out.shape)}, drafts {tuple(drafts.shape)}"
    )
    flat = (sampled, slots, bounds, lengths, last_token, last_rows)
    assert (
        all(x.stride() == (1,) for x in flat) and out.is_contiguous() and drafts.stride(1) == 1
    ), f"strides {[x.stride() for x in flat]}, {out.stride()}, {drafts.stride()}"
    _accept_kernel[(count,)](
        sampled,
        slots,
        bounds,
        drafts,
        lengths,
        last_token,
        out,
        last_rows,
        decodes,
        drafts.stride(0),
        ROWS=rows,
        WIDTH=triton.next_power_of_2(rows),
        UNUSED_TOKEN=UNUSED,
        num_warps=1,
        **launch_options(),
    )


@triton.jit(
    do_not_specialize=["decodes", "draft_stride"],
    do_not_specialize_on_alignment=["sampled", "slots", "bounds", "out", "last_rows"],
)
def _accept_kernel(
    sampled,
    slots,
    bounds,
    drafts,
    lengths,
    last_token,
    out,
    last_rows,
    decodes,
    draft_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNUSED_TOKEN: tl.constexpr,
):
    wait_for_previous()
    at = tl.program_id(0)
    is_decode = at < decodes
    slot = tl.load(slots + at)
    length = tl.load(lengths + slot)
    rank = tl.arange(0, WIDTH)
    first = tl.where(is_decode, at * ROWS, decodes * (ROWS - 1) + at)
    own_rows = tl.where(is_decode, ROWS, 1)
    token = tl.load(sampled + first + rank, rank < own_rows, other=UNUSED_TOKEN)
    draft = tl.load(drafts + slot * draft_stride + rank, rank < own_rows - 1, other=UNUSED_TOKEN)
    room = tl.load(bounds + at, is_decode, other=0) - length
    right = (token == draft) & (rank < room) & (rank < own_rows - 1)
    accepted = tl.min(tl.where(right, WIDTH, rank), 0)
    tl.store(out + at * ROWS + rank, tl.where(rank <= accepted, token, UNUSED_TOKEN), rank < ROWS)
    tl.store(last_rows + at, (first + accepted).to(tl.int64))
    last = tl.sum(tl.where(rank == accepted, token, 0), 0)
    tl.store(last_token + slot, tl.maximum(last, 0).to(tl.int64))
    tl.store(lengths + slot, length + accepted + 1)
