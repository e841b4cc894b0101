"""Limits of the GPU that kernels run on, read once, by which tilings are chosen.

A tiling is the first of some candidates that is legal on a device (`first_legal`). Candidates are in the order of
their speed on an H200, the only GPU on which they were measured; those behind the first are for smaller chips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

# Of a multiprocessor's shared memory, taken by each block beside what it asks for
BLOCK_OVERHEAD = 1024
OLDEST = 80  # tensor cores that multiply bfloat16, and asynchronous copies to shared memory
NEWEST = 109  # of the families whose code is compiled in tests

Candidate = TypeVar("Candidate")


class UnsupportedDevice(Exception):
    """The device cannot run a kernel; the text says why."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one kind of GPU."""

    architecture: int  # compute capability times 10: 90 on an H200
    multiprocessors: int
    shared_bytes: int  # shared memory of a block
    multiprocessor_shared_bytes: int
    registers: int  # of a multiprocessor, 32 bits each

    @property
    def is_hopper(self) -> bool:
        """Whether it runs kernels in Gluon for sm_90."""
        return self.architecture // 10 == 9

    @property
    def has_tensor_memory_accelerator(self) -> bool:
        return self.architecture >= 90

    @property
    def has_tensor_memory(self) -> bool:
        """Whether products of 64 rows and more are summed in tensor memory (sm_100), which has no room for 64 x 512 sums
        beside the scores: Triton makes a trap of such a kernel."""
        return self.architecture >= 100

    def resident(self, shared_bytes: int) -> int:
        """Blocks of so much shared memory each that fit a multiprocessor at a time."""
        return self.multiprocessor_shared_bytes // (shared_bytes + BLOCK_OVERHEAD)


H200 = Limits(90, 132, 232_448, 233_472, 65_536)
# Where there is no GPU kernels are interpreted, or compiled only. Few programs run at a time, so that each has several
# tiles in tests.
NO_GPU = Limits(90, 4, 232_448, 233_472, 65_536)


def limits(device: torch.device) -> Limits:
    """Of `device`; of any that is no GPU, NO_GPU."""
    return _read(device) if device.type == "cuda" else NO_GPU


@cache
def _read(device: torch.device) -> Limits:
    found: Any = torch.cuda.get_device_properties(device)  # torch's stubs leave some of them out
    return Limits(
        architecture=10 * found.major + found.minor,
        multiprocessors=found.multi_processor_count,
        shared_bytes=found.shared_memory_per_block_optin,
        multiprocessor_shared_bytes=found.shared_memory_per_multiprocessor,
        registers=found.regs_per_multiprocessor,
    )


def check_architecture(found: Limits) -> None:
    """Raises UnsupportedDevice for GPUs for which no kernel was ever compiled."""
    if not OLDEST <= found.architecture <= NEWEST:
        raise UnsupportedDevice(
            f"compute capability {found.architecture / 10}: kernels are for {OLDEST / 10} to {NEWEST / 10}"
        )


def first_legal(
    name: str,
    candidates: Iterable[Candidate],
    shared_bytes: Callable[[Candidate], int],
    found: Limits,
) -> Candidate:
    """The first of `candidates` of which a block's shared memory is within the limit. Raises UnsupportedDevice if
    none is."""
    smallest = None
    for candidate in candidates:
        needed = shared_bytes(candidate)
        if needed <= found.shared_bytes:
            return candidate
        smallest = needed if smallest is None else min(smallest, needed)
    raise UnsupportedDevice(
        f"{name} needs {smallest} bytes of shared memory in a block, the device has {found.shared_bytes}"
    )
