"""Calls of collectives, for the processes of `support.ranks`."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from mla_router.worker.kernels.comm.group import Group


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns the argument of `rank`: other numbers on each."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def name(group: Group) -> tuple[int, int, str]:
    return group.rank, group.size, group.backend


def all_reduce(group: Group, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = numbers(group.rank, shape, dtype)
    result = group.all_reduce(x)
    assert result is x
    return x


def all_gather(group: Group, shape: tuple[int, ...], dtype: torch.dtype, dim: int) -> Tensor:
    return group.all_gather(numbers(group.rank, shape, dtype).t().contiguous().t(), dim)


def all_reduce_without(group: Group, rank: int) -> None:
    """Ends the process of `rank` instead of the call."""
    if group.rank == rank:
        os._exit(1)
    group.all_reduce(torch.ones(1))
