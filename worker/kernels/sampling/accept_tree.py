"""Accepts nodes of trees of drafts whose tokens equal the model's own, with the rule of `accept.py`.

A node is accepted if its parent is, and if its token is the one that the model samples in the row of its parent. Children
of a node have different tokens, so the accepted nodes are a path from the root.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.step.result import UNUSED


def accept_tree(
    sampled: Tensor,
    slots: Tensor,
    bounds: Tensor,
    drafts: Tensor,
    parents: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    out: Tensor,
    last_rows: Tensor,
    path: Tensor,
    limits: Tensor | None = None,
) -> None:
    """Takes the tokens that S slots gained in a step.

    The first D slots have N adjacent rows, for the nodes of their trees; the others have one row, after those.
    `sampled` [D * N + S - D] int32: the model's token of each row, or NO_TOKEN. `slots` [S] int64, distinct.
    `bounds` [D] int64: upper bounds of the slots' tokens in the KV cache; nodes beyond are idle, and are not accepted.
    `drafts` [all slots, N - 1] int64: tokens of the nodes after the root. `parents` [all slots, N] int64.

    Writes the gained tokens to `out` [S, n] int32, with UNUSED after them: n is one more than the depth of the trees.
    Writes the accepted nodes, the root included if it is not idle, to `path` [S, n] int64, with UNUSED after them.
    `limits` [D] int32: the numbers of accepted nodes are less; by default any node may be. The rest is as in `accept`.
    """
    op = accept_tree_triton if sampled.is_cuda else accept_tree_torch
    op(sampled, slots, bounds, drafts, parents, lengths, last_token, out, last_rows, path, limits)


def accept_tree_torch(
    sampled: Tensor,
    slots: Tensor,
    bounds: Tensor,
    drafts: Tensor,
    parents: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    out: Tensor,
    last_rows: Tensor,
    path: Tensor,
    limits: Tensor | None = None,
) -> None:
    decodes, nodes, most = len(bounds), parents.shape[1], out.shape[1]
    own, others = sampled[: decodes * nodes].view(decodes, nodes), sampled[decodes * nodes :]
    of = slots[:decodes]
    room = bounds - lengths[of]
    tokens = torch.cat((torch.full_like(of[:, None], UNUSED), drafts[of, : nodes - 1]), dim=1)
    parent = parents[of]
    if limits is not None:
        beyond = torch.arange(nodes, device=of.device) >= limits[:, None]
        tokens = tokens.masked_fill(beyond, UNUSED)
    path.fill_(UNUSED)
    path[:, 0] = 0
    path[:decodes, 0] = torch.where(room >= 0, 0, UNUSED)
    at, rows = torch.zeros_like(of), torch.arange(decodes, device=of.device) * nodes
    for depth in range(1, most):
        drawn = own.gather(1, at[:, None])
        right = (parent == at[:, None]) & (tokens == drawn) & (room >= depth)[:, None]
        right &= (path[:decodes, depth - 1] != UNUSED)[:, None]
        accepted, child = right.int().max(dim=1)
        path[:decodes, depth] = torch.where(accepted > 0, child, UNUSED)
        at = torch.where(accepted > 0, child, at)
    gained = path[:decodes] != UNUSED
    gained[:, 0] = True  # an idle root gives a token as well, of an answer that is at its end
    out.fill_(UNUSED)
    taken = own.gather(1, path[:decodes].clamp_min(0))
    out[:decodes] = torch.where(gained, taken, UNUSED)
    out[decodes:, 0] = others
    last_rows[:decodes] = rows + at
    last_rows[decodes:] = torch.arange(decodes * nodes, len(sampled), device=of.device)
    last_token[slots] = sampled[last_rows].long().clamp_min(0)
    lengths[of] += gained.sum(dim=1).to(lengths.dtype)
    lengths[slots[decodes:]] += 1


def accept_tree_triton(
    sampled: Tensor,
    slots: Tensor,
    bounds: Tensor,
    drafts: Tensor,
    parents: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    out: Tensor,
    last_rows: Tensor,
    path: Tensor,
    limits: Tensor | None = None,
) -> None:
    decodes, nodes, (count, most) = len(bounds), parents.shape[1], out.shape
    assert len(sampled) == decodes * nodes + count - decodes and drafts.shape[1] >= nodes - 1, (
        f"sampled {tuple(sampled.shape)}, {decodes} bounds, out {tuple(out.shape)}, drafts {tuple(drafts.shape)}"
    )
    flat = (sampled, slots, bounds, lengths, last_token, last_rows)
    assert limits is None or (limits.shape == bounds.shape and limits.is_contiguous()), (
        f"limits {limits}, {decodes} bounds"
    )
    assert (
        all(x.stride() == (1,) for x in flat)
        and out.is_contiguous()
        and path.shape == out.shape
        and path.is_contiguous()
        and drafts.stride(1) == parents.stride(1) == 1
    ), f"strides {[x.stride() for x in (*flat, out, path, drafts, parents)]}"
    _accept_tree_kernel[(count,)](
        sampled,
        slots,
        bounds,
        drafts,
        parents,
        lengths,
        last_token,
        out,
        last_rows,
        path,
        limits,
        decodes,
        drafts.stride(0),
        parents.stride(0),
        NODES=nodes,
        WIDTH=triton.next_power_of_2(nodes),
        MOST=most,
        UNUSED_TOKEN=UNUSED,
        num_warps=1,
        **launch_options(),
    )


@triton.jit(
    do_not_specialize=["decodes", "draft_stride", "parent_stride"],
    do_not_specialize_on_alignment=[
        "sampled",
        "slots",
        "bounds",
        "out",
        "last_rows",
        "path",
        "limits",
    ],
)
def _accept_tree_kernel(
    sampled,
    slots,
    bounds,
    drafts,
    parents,
    lengths,
    last_token,
    out,
    last_rows,
    path,
    limits,
    decodes,
    draft_stride,
    parent_stride,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    UNUSED_TOKEN: tl.constexpr,
):
    wait_for_previous()
    at = tl.program_id(0)
    is_decode = at < decodes
    slot = tl.load(slots + at)
    length = tl.load(lengths + slot)
    node = tl.arange(0, WIDTH)
    first = tl.where(is_decode, at * NODES, decodes * (NODES - 1) + at)
    limit = NODES
    if limits is not None:
        limit = tl.load(limits + at, is_decode, other=0)
    is_draft = is_decode & (node > 0) & (node < NODES) & (node < limit)
    parent = tl.load(parents + slot * parent_stride + node, is_draft, other=-1)
    token = tl.load(drafts + slot * draft_stride + node - 1, is_draft, other=UNUSED_TOKEN)
    drawn = tl.load(sampled + first + node, is_draft | (node == 0), other=UNUSED_TOKEN)
    room = tl.where(is_decode, tl.load(bounds + at, is_decode, other=0) - length, 0)
    current = 0
    last = tl.sum(tl.where(node == 0, drawn, 0), 0)
    accepted = room >= 0
    gained = 1
    tl.store(out + at * MOST, last)
    tl.store(path + at * MOST, tl.where(accepted, 0, UNUSED_TOKEN).to(tl.int64))
    for depth in tl.static_range(1, MOST):
        right = (parent == current) & (token == last) & (depth <= room) & accepted
        child = tl.min(tl.where(right, node, WIDTH), 0)
        accepted = child < WIDTH
        current = tl.where(accepted, child, current)
        last = tl.where(accepted, tl.sum(tl.where(node == child, drawn, 0), 0), last)
        gained += accepted.to(tl.int32)
        tl.store(out + at * MOST + depth, tl.where(accepted, last, UNUSED_TOKEN))
        tl.store(path + at * MOST + depth, tl.where(accepted, child, UNUSED_TOKEN).to(tl.int64))
    tl.store(last_rows + at, (first + current).to(tl.int64))
    tl.store(last_token + slot, tl.maximum(last, 0).to(tl.int64))
    tl.store(lengths + slot, length + gained)
