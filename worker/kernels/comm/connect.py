"""Connects the processes of a group.

torch's process groups are created directly: `torch.distributed.init_process_group` would keep one as global state, and
let gloo listen on the address of the host's name.
"""

from __future__ import annotations

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


def connect(
    rank: int,
    size: int,
    store: Store,
    device: torch.device,
    timeout_s: float,
    name: str,
    address: str,
) -> Backend:
    """Returns the process group of `size` ranks (`Group.join`)."""
    timeout = timedelta(seconds=timeout_s)
    named = PrefixStore(name, store)
    named.set_timeout(timeout)
    if device.type == "cpu":
        gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._devices = [ProcessGroupGloo.create_device(hostname=address)]
        gloo._timeout = timeout
        return ProcessGroupGloo(named, rank, size, gloo)
    nccl = ProcessGroupNCCL.Options()
    nccl._timeout = timeout
    group = ProcessGroupNCCL(named, rank, size, nccl)
    group.eager_connect_single_device(device)
    return group
