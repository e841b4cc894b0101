"""Connects the processes of a group.

torch's process groups are created directly: `torch.distributed.init_process_group` would keep one as global state, and
let gloo listen on the address of the host's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch._C._distributed_c10d import (
    Backend,
    PrefixStore,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    Store,
)

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Meeting:
    """How one rank finds the others, the same for all of its groups."""

    store: Store  # of all ranks
    device: torch.device  # of this rank
    timeout_s: float = 1800.0  # how long it waits for the others
    address: str = LOOPBACK  # an address of this machine, on which gloo listens
    shares_memory: bool = True  # whether over memory that the GPUs share, where they can


def connect(rank: int, size: int, meeting: Meeting, name: str) -> Backend:
    """Returns the process group of `size` ranks (`Group.join`)."""
    device = meeting.device
    timeout = timedelta(seconds=meeting.timeout_s)
    named = PrefixStore(name, meeting.store)
    named.set_timeout(timeout)
    if device.type == "cpu":
        gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._devices = [ProcessGroupGloo.create_device(hostname=meeting.address)]
        gloo._timeout = timeout
        return ProcessGroupGloo(named, rank, size, gloo)
    nccl = ProcessGroupNCCL.Options()
    nccl._timeout = timeout
    group = ProcessGroupNCCL(named, rank, size, nccl)
    group.eager_connect_single_device(device)
    return group
