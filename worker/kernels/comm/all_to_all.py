"""The exchange of rows with the ranks that have their experts.

A rank chooses the experts of its own rows and sends the choice to all ranks. A row goes only to ranks with one of its
experts, and only they send a part of its result back, as in DeepEP (DeepSeek-V3, arXiv:2412.19437, section 3.2.2). Rows
keep their places among the rows of all ranks, so that shapes follow from the numbers of rows alone; a row that was not
sent has no pair on this rank, and is not read.

This is the definition, with sizes that the host reads. `one_shot_all_to_all.py` has kernels for few rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mla_router.worker.kernels.weight import Activations, Quantized

if TYPE_CHECKING:
    from mla_router.worker.kernels.comm.group import Group

NOT_SENT = 0xFF  # each byte of a row that was not sent: NaN in all floating-point dtypes


class Choice(NamedTuple):
    """The experts of rows, among those of all ranks."""

    weights: Tensor  # [T, K] float32, not negative
    ids: Tensor  # [T, K] int32: -1 for idle rows


class ExpertTables(NamedTuple):
    """The places of E experts. Row s among the rows of all ranks takes the replica in column s % C."""

    table: Tensor  # [E, C] int32: the index on this rank or -1 (`moe_routing`)
    reaches: Tensor  # [E, C, size] bool: whether each rank has the replica, or a part of it
    counts: Tensor | None = None  # [E] int64: the pairs of all ranks are added to it


class Dispatched(NamedTuple):
    """The rows of all ranks, as this rank has them. T: own rows, S: rows of all."""

    rows: Activations  # [S, N]: those without a pair here are undefined
    weights: Tensor  # [S, K] float32: 0 for experts of other ranks
    ids: Tensor  # [S, K] int32: index of the expert here, or -1
    went: Tensor  # [T, size] bool: whether each rank has a pair of the own row
    came: Tensor  # [S] bool: whether this rank has a pair of the row


def dispatch_torch(
    group: Group, rows: Activations, choice: Choice, experts: ExpertTables, counts: Sequence[int]
) -> Dispatched:
    """Returns the rows of all ranks. `rows` [T, N], `counts`: see `Group.gather_rows`."""
    weights, ids = group.gather_rows(choice.weights, counts), group.gather_rows(choice.ids, counts)
    idle, expert = ids < 0, ids.clamp(min=0)
    column = (torch.arange(len(ids), device=ids.device) % experts.table.shape[1])[:, None]
    reached = (experts.reaches[expert, column] & ~idle[..., None]).any(1)
    if experts.counts is not None:
        experts.counts.index_add_(0, expert.flatten(), (~idle).flatten().to(experts.counts.dtype))
    ids = experts.table[expert, column].masked_fill(idle, -1)
    came, went = reached[:, group.rank], torch.split(reached, list(counts))[group.rank]

    def sent(x: Tensor) -> Tensor:
        bytes_of = x.contiguous().view(torch.uint8)
        arriving = [int(part.sum()) for part in torch.split(came, list(counts))]
        parts = group.all_to_all([bytes_of[to] for to in went.unbind(1)], arriving)
        of_all = bytes_of.new_full((len(ids), bytes_of.shape[1]), NOT_SENT)
        of_all[came] = torch.cat(parts)
        return of_all.view(x.dtype)

    if isinstance(rows, Quantized):
        of_all: Activations = Quantized(
            sent(rows.values), sent(rows.scales), rows.group, rows.dtype
        )
    else:
        of_all = sent(rows)
    return Dispatched(of_all, weights.masked_fill(ids < 0, 0.0), ids, went, came)


def combine_torch(group: Group, results: Tensor, sent: Dispatched, counts: Sequence[int]) -> Tensor:
    """Returns the sums [T, N] of own rows over the ranks that have results of them, in the order of the ranks and in
    float32. This rank's own results always count. results [S, N]: of the rows of `sent`."""
    of_ranks, came = (torch.split(x, list(counts)) for x in (results, sent.came))
    arriving: list[int] = sent.went.sum(0).tolist()
    parts = group.all_to_all(
        [rows[here] for rows, here in zip(of_ranks, came, strict=True)], arriving
    )
    own = of_ranks[group.rank]
    total = torch.zeros_like(own, dtype=torch.float32)
    for rank, part in enumerate(parts):
        if rank == group.rank:
            total += own
        else:
            total[sent.went[:, rank]] += part
    return total.to(results.dtype)
