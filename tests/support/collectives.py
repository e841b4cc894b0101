"""Calls of collectives, for the processes of `support.ranks`."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.rms_norm import add_rms_norm, rms_norm


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns the argument of `rank`: each rank has other numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def name(group: Group) -> tuple[int, int, str]:
    return group.rank, group.size, group.backend


def all_reduce(group: Group, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = numbers(group.rank, shape, dtype)
    result = group.all_reduce(x)
    assert result is x
    return x


def all_gather(
    group: Group, shape: tuple[int, ...], dtype: torch.dtype, dim: int, device: str = "cpu"
) -> Tensor:
    x = numbers(group.rank, shape, dtype).to(device)
    return group.all_gather(x.t().contiguous().t(), dim).cpu()


def rows_of(rank: int, count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Returns small integers [count, width], other ones on each rank."""
    return (torch.arange(count * width).view(count, width) % 64 + 10 * rank).to(dtype)


def rows_of_all(
    group: Group, counts: Sequence[int], width: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Returns the gathered rows, and own rows of their sum over the ranks, for `rows_of` each rank."""
    own = rows_of(group.rank, counts[group.rank], width, dtype).to(device)
    gathered = group.gather_rows(own, counts)
    parts = own, own.view(torch.uint8), own[:, :1].float()
    together = group.gather_together(parts, counts)
    assert torch.equal(together[0], gathered)
    assert torch.equal(together[1], gathered.view(torch.uint8))
    assert torch.equal(together[2], gathered[:, :1].float())
    return gathered.cpu(), group.scatter_rows(gathered.clone(), counts).cpu()


def all_reduce_without(group: Group, rank: int) -> None:
    """Ends the process of `rank` instead of the call."""
    if group.rank == rank:
        os._exit(1)
    group.all_reduce(torch.ones(1))


def in_a_graph(group: Group, seeds: Sequence[int]) -> list[Tensor]:
    """Returns the results of a captured graph on a GPU, [4, 2048] in bfloat16 for each seed: a norm, a sum over the ranks,
    and a norm again. `inputs` has the rows."""
    device = torch.device("cuda", group.rank)
    x = torch.zeros(4, 2048, dtype=torch.bfloat16, device=device)
    weight = torch.ones(2048, dtype=torch.bfloat16, device=device)

    def step() -> Tensor:
        total = group.all_reduce(rms_norm(x, weight, 1e-6))
        return add_rms_norm(total, x, weight, 1e-6)[0]

    step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    results = []
    for seed in seeds:
        x.copy_(inputs(group.rank, seed))
        graph.replay()
        results.append(result.cpu())
    return results


def inputs(rank: int, seed: int) -> Tensor:
    return numbers(100 * seed + rank, (4, 2048), torch.bfloat16)
