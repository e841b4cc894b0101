"""Accepts nodes of trees of drafts whose tokens equal the model's own, with the rule of `accept.py`.

A node is accepted if its parent is, and if its token is the one that the model samples in the row of its parent. Children
of a node have different tokens, so the accepted nodes are a path from the root.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.core import UNUSED


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
) -> None:
    """Takes the tokens that S slots gained in a step.

    The first D slots have N adjacent rows, for the nodes of their trees; the others have one row, behind those.
    `sampled` [D * N + S - D] int32: the model's token of each row, or NO_TOKEN. `slots` [S] int64, distinct.
    `bounds` [D] int64: most tokens of the slots in the KV cache; nodes beyond are idle, and are not accepted.
    `drafts` [all slots, N - 1] int64: tokens of the nodes behind the root. `parents` [all slots, N] int64.

    Writes the gained tokens to `out` [S, n] int32, with UNUSED behind them: n is one more than the depth of the trees. Writes
    the accepted nodes, the root included if it is not idle, to `path` [S, n] int64, with UNUSED behind them. The rest is as
    of `accept`.
    """
    accept_tree_torch(
        sampled, slots, bounds, drafts, parents, lengths, last_token, out, last_rows, path
    )


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
) -> None:
    decodes, nodes, most = len(bounds), parents.shape[1], out.shape[1]
    own, others = sampled[: decodes * nodes].view(decodes, nodes), sampled[decodes * nodes :]
    of = slots[:decodes]
    room = bounds - lengths[of]
    tokens = torch.cat((torch.full_like(of[:, None], UNUSED), drafts[of, : nodes - 1]), dim=1)
    parent = parents[of]
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
