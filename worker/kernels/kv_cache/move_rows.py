"""Moves the keys and values of accepted nodes of trees of drafts to the pages of their slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mla_router.worker.core import UNUSED


def move_rows(
    layers: Sequence[Tensor],
    path: Tensor,
    slots: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    *,
    first_row: int,
    nodes: int,
) -> None:
    """Moves the rows of the nodes in `path` [D, n] int64, UNUSED behind the last one, for D slots: in each layer
    [pages, page_size, W] row `first_row` + i * `nodes` + node of slot i. `slots` [D] int64; `lengths` [all slots] int32:
    tokens with those that the step gave, as many as there are nodes in the path, of which the last one has no row yet;
    page_table [all slots, P] int32."""
    move_rows_torch(layers, path, slots, lengths, page_table, first_row=first_row, nodes=nodes)


def move_rows_torch(
    layers: Sequence[Tensor],
    path: Tensor,
    slots: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    *,
    first_row: int,
    nodes: int,
) -> None:
    count, page_size = path.shape[0], layers[0].shape[1]
    accepted = path != UNUSED
    gained = accepted.sum(dim=1, keepdim=True)
    steps = torch.arange(path.shape[1], device=path.device)
    positions = lengths[slots].long()[:, None] - gained - 1 + steps
    positions = torch.where(accepted, positions, 0)
    pages = page_table[slots].gather(1, positions // page_size).long()
    own = torch.arange(count, device=path.device)[:, None] * nodes
    # Page 0 is read by no request
    to = torch.where(accepted, pages * page_size + positions % page_size, 0).flatten()
    source = torch.where(accepted, first_row + own + path, 0).flatten()
    for layer in layers:
        rows = layer.view(-1, layer.shape[-1])
        rows.index_copy_(0, to, rows.index_select(0, source))
