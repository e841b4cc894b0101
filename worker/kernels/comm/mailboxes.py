"""The choice of collectives for few rows, and the memory of GPUs that all ranks of a group map for them.

The memory is torch's symmetric memory: ranks pass descriptors of each other's memory through Unix sockets, once, after
they have found each other in the store. It needs one machine whose GPUs access each other's memory, by NVLink or PCIe.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    Store,
    _register_process_group,
    _SymmetricMemory,
)

from mla_router.worker.kernels.comm import one_shot, one_shot_all_to_all
from mla_router.worker.kernels.comm.one_shot import GENERATIONS, Mailboxes
from mla_router.worker.kernels.comm.one_shot_all_to_all import RowBoxes

MAX_ROWS = 128
MAX_WIDTH = 8192
MAX_SENT_ROWS = 256  # of each rank, to the ranks of their experts


class OneShot(NamedTuple):
    """The mailboxes of a rank, or its boxes of rows for experts, or neither, and the choice in words."""

    boxes: Mailboxes | None
    choice: str
    row_boxes: RowBoxes | None = None


class Place(msgspec.Struct, frozen=True):
    """The GPU of a rank. `reaches`: the GPUs whose memory it can access, by their UUIDs."""

    machine: str
    gpu: str
    reaches: tuple[str, ...]


FLAG = "--disable-custom-all-reduce"
NCCL_CHOSEN = OneShot(None, f"NCCL alone: {FLAG}")


def join_one_shot(
    rank: int, size: int, store: Store, device: torch.device, name: str, *, all_to_all: bool
) -> OneShot:
    """Waits for the other ranks of the group `name`. All make the same choice, by the places of all."""
    own = PrefixStore(f"one-shot {name}", store)
    own.set(f"place/{rank}", msgspec.json.encode(place_of(device)).decode())
    places = [msgspec.json.decode(own.get(f"place/{other}"), type=Place) for other in range(size)]
    reason = obstacle(places)
    if reason is not None:
        return OneShot(None, f"NCCL alone: {reason}")
    how = f"by one kernel, over memory that the GPUs share ({FLAG} turns it off); else NCCL"
    if all_to_all:
        boxes = map_row_boxes(rank, size, own, device)
        return OneShot(None, f"few rows to the ranks of their experts, {how}", boxes)
    return OneShot(map_mailboxes(rank, size, own, device), f"few rows {how}")


def place_of(device: torch.device) -> Place:
    def identity(gpu: int) -> str:
        return str(torch.cuda.get_device_properties(gpu).uuid)

    assert device.index is not None, device
    others = (gpu for gpu in range(torch.cuda.device_count()) if gpu != device.index)
    near = (gpu for gpu in others if torch.cuda.can_device_access_peer(device.index, gpu))
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Place(machine, identity(device.index), tuple(map(identity, near)))


def obstacle(places: Sequence[Place]) -> str | None:
    """Returns the reason why ranks at `places` cannot share memory, or None."""
    if len({place.machine for place in places}) > 1:
        return "the ranks are on several machines"
    for rank, place in enumerate(places):
        for other, theirs in enumerate(places):
            if other != rank and theirs.gpu not in place.reaches:
                return f"the GPU of rank {rank} cannot access the memory of the GPU of rank {other}"
    return None


def map_mailboxes(rank: int, size: int, store: Store, device: torch.device) -> Mailboxes:
    """Waits for the other ranks, which use `store` for nothing else, and returns the mailboxes of `rank`."""
    turns = torch.empty(MAX_ROWS, dtype=torch.int32, device=device)
    slots, addresses = _map(
        rank,
        size,
        store,
        device,
        shape=(GENERATIONS, MAX_ROWS, size, MAX_WIDTH),
        dtype=torch.bfloat16,
        prepare=partial(one_shot.clear, turns=turns),
    )
    return Mailboxes(rank, slots, addresses, turns)


def map_row_boxes(rank: int, size: int, store: Store, device: torch.device) -> RowBoxes:
    """`map_mailboxes` for the kernels of `one_shot_all_to_all.py`."""
    turns = torch.empty(MAX_SENT_ROWS, dtype=torch.int32, device=device)
    memory, addresses = _map(
        rank,
        size,
        store,
        device,
        shape=(one_shot_all_to_all.words(MAX_SENT_ROWS, size, MAX_WIDTH),),
        dtype=torch.int32,
        prepare=partial(one_shot_all_to_all.clear, turns=turns),
    )
    return RowBoxes(rank, size, MAX_WIDTH, memory, addresses, turns)


def _map(
    rank: int,
    size: int,
    store: Store,
    device: torch.device,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    prepare: Callable[[Tensor], None],
) -> tuple[Tensor, Tensor]:
    """Returns memory of this rank, which `prepare` has filled, and the addresses [size] int64 of that of all ranks."""
    if rank == 0:
        store.set("name", uuid.uuid4().hex)
    name = store.get("name").decode()  # unique, as torch keeps names until the process ends
    processes = ProcessGroup(store, rank, size)
    _register_process_group(name, processes)  # type: ignore[arg-type]  # by which torch finds the store
    strides = torch.empty(shape, device="meta").stride()
    memory = _SymmetricMemory.empty_strided_p2p(shape, strides, dtype, device, name)
    prepare(memory)
    torch.cuda.synchronize(device)
    # Returns when all ranks have come this far
    shared = _SymmetricMemory.rendezvous(memory)
    return memory, torch.tensor(shared.buffer_ptrs, dtype=torch.int64, device=device)
