"""Memory that the ranks of a group on a CPU share, in place of the memory of GPUs (`comm/mailboxes.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mla_router.worker.kernels.comm.group import Group

_mappings: list[list[Tensor]] = []  # kept: kernels have their addresses alone


def map_files(
    group: Group,
    folder: Path,
    name: str,
    count: int,
    dtype: torch.dtype,
    prepare: Callable[[Tensor], None],
) -> tuple[Tensor, Tensor]:
    """Returns `count` numbers of this rank, which `prepare` has filled, and the addresses [size] int64 of those of all
    ranks. `folder`: the same for all ranks."""

    def mapped(rank: int) -> Tensor:
        return torch.from_file(str(folder / f"{name}-{rank}"), shared=True, size=count, dtype=dtype)

    own = mapped(group.rank)
    prepare(own)
    group.all_reduce(torch.zeros(1))  # all have prepared theirs
    memory = [own if rank == group.rank else mapped(rank) for rank in range(group.size)]
    _mappings.append(memory)
    return own, torch.tensor([each.data_ptr() for each in memory])
